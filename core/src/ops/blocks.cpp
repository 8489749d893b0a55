#include "ops/blocks.h"

#include <cstring>

#include "base/error.h"
#include "group/group.h"
#include "group/lane.h"

namespace phx {

CountMatrix::CountMatrix(Group &group, const char *name, const Blocks &in, const Blocks &out)
    : group_(group), name_(name), n_(group.size()), self_(group.group_rank()), in_(in), out_(out) {}

void CountMatrix::put(const Lane &lane, uint64_t epoch) const {
  char *const slot = lane.data(self_, epoch);
  for (int i = 0; i < n_; ++i) {
    const size_t pair[2] = {in_.count(i), out_.count(i)};
    std::memcpy(slot + i * sizeof pair, pair, sizeof pair);
  }
  kernels::demote(slot, n_ * 2 * sizeof(size_t));
}

phx_status CountMatrix::read(const Lane &lane, uint64_t epoch, const std::vector<size_t> *room) {
  const size_t row = static_cast<size_t>(n_) * 2;
  // Copied once, so that a peer that writes later cannot change the counts between the check and their use.
  matrix_.resize(n_ * row);
  for (int rank = 0; rank < n_; ++rank) std::memcpy(&matrix_[rank * row], lane.data(rank, epoch), row * sizeof(size_t));
  bool spoiled = false;  // a peer wrote into this rank's slot
  for (int peer = 0; peer < n_; ++peer) {
    size_t *const pair = &matrix_[self_ * row + peer * 2];
    spoiled = spoiled || pair[0] != in_.count(peer) || pair[1] != out_.count(peer);
    pair[0] = in_.count(peer);
    pair[1] = out_.count(peer);
  }
  const phx_status status = check(room);
  // All ranks get the same error, unless a peer has changed counts that are not its own: then the group fails.
  return status != PHX_OK && spoiled ? group_.fail_with(last_error(), true) : status;
}

phx_status CountMatrix::check(const std::vector<size_t> *room) {
  for (int from = 0; from < n_; ++from) {
    size_t left = room == nullptr ? SIZE_MAX : (*room)[from];
    for (int to = 0; to < n_; ++to) {
      if (sent(from, to) != expected(to, from))
        return fail(PHX_ERR_MISMATCH, name_,
                    "%s: group rank %d sends %zu elements to group rank %d, which expects %zu. in_counts[j] on rank i "
                    "must equal out_counts[i] on rank j.",
                    name_, from, sent(from, to), to, expected(to, from));
      if (sent(from, to) > left)
        return fail(PHX_ERR_MISMATCH, name_, "%s: the counts of group rank %d go beyond its block", name_, from);
      left -= sent(from, to);
      most_sent_ = std::max(most_sent_, sent(from, to));
    }
  }
  return PHX_OK;
}

}  // namespace phx
