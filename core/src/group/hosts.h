// The hosts of a group, in the order of the first rank of each, and the ranks on them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace phx {

class Hosts {
 public:
  Hosts() = default;
  // `host_of`: the number of the host of each group rank. The numbers begin at 0 and have no gaps.
  Hosts(std::vector<int> host_of, int group_rank) : host_of_(std::move(host_of)) {
    for (size_t rank = 0; rank < host_of_.size(); ++rank) {
      const auto host = static_cast<size_t>(host_of_[rank]);
      if (host >= ranks_.size()) ranks_.resize(host + 1);
      position_.push_back(static_cast<int>(ranks_[host].size()));
      ranks_[host].push_back(static_cast<int>(rank));
    }
    own_ = host_of_[group_rank];
    local_rank_ = position_[group_rank];
    rails_ = local_size();
    for (const std::vector<int> &ranks : ranks_) rails_ = std::min(rails_, static_cast<int>(ranks.size()));
  }

  int count() const { return static_cast<int>(ranks_.size()); }
  int ranks() const { return static_cast<int>(host_of_.size()); }
  int own() const { return own_; }
  int of(int group_rank) const { return host_of_[group_rank]; }
  bool is_here(int group_rank) const { return host_of_[group_rank] == own_; }
  // The position of a rank among those of its host; lanes number the ranks by it.
  int position(int group_rank) const { return position_[group_rank]; }
  int local_rank() const { return local_rank_; }
  int size(int host) const { return static_cast<int>(ranks_[host].size()); }
  int local_size() const { return size(own_); }
  // The group rank at that position of a host.
  int rank(int host, int position) const { return ranks_[host][position]; }
  int local(int position) const { return rank(own_, position); }
  const std::vector<int> &local_ranks() const { return ranks_[own_]; }
  // How many ranks of every host carry data to the other hosts: as many as the smallest host has. Rail i joins the
  // ranks at position i.
  int rails() const { return rails_; }

 private:
  std::vector<int> host_of_, position_;
  std::vector<std::vector<int>> ranks_;
  int own_ = 0, local_rank_ = 0, rails_ = 1;
};

}  // namespace phx
