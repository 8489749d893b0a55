// One attempt to create a group: finds out which members have ended or given up while this rank waits for them.
//
// Until the members are connected, a rank can tell the others only through the store that it has failed. It writes its
// error under one key of the attempt, which waiting ranks read from time to time. The n-th attempt of a rank at a name
// is the n-th attempt of all ranks: if it fails on one rank it fails on all, also on those that start it late, and the
// next attempt is independent of it.
#pragma once

#include <string>
#include <vector>

#include "world/world.h"

namespace phx {

inline constexpr const char *kGroupCreate = "group_create";  // for errors

class Attempt {
 public:
  Attempt(World &world, phx_store *store, const std::string &key)
      : world_(world), store_(store), key_(failure_key(key)) {}
  // The key in the store for the failure of the attempt with `key`.
  static std::string failure_key(const std::string &key) { return key + "/failed"; }

  // PHX_OK unless it has become useless to wait for the owners of `records` (records that have not been read yet are
  // zero). Otherwise the thread's error names the rank that ended, or is that of the rank that gave up.
  phx_status look(const std::vector<PeerRecord> &records);

  // Reads the part of a record that all builds have in common. False if these bytes are not a record.
  static bool read_prefix(const std::string &value, PeerRecord *out);
  // Fails with PHX_ERR_ABI, because the rank of that record runs another build than this rank. Names both builds.
  phx_status refuse_build(const PeerRecord &theirs) const;

  // Writes the thread's error to the store, unless another rank has written a failure before. The error stays as it is.
  void give_up(const std::vector<PeerRecord> &records);

 private:
  phx_status look_at(const PeerRecord &record);
  phx_status read_failure(const std::vector<PeerRecord> &records, Uuid *reporter);

  World &world_;
  phx_store *store_;
  const std::string key_;
  bool from_peer_ = false;  // this rank's error is the failure that another one has written
};

}  // namespace phx
