// One attempt to make a group, as seen from outside of it: who has ended meanwhile, and who has given up.
//
// Until the members are connected, the store is the only place where one can tell the others that it has failed. It
// does so under one key of the attempt, and whoever waits looks there now and then. Every rank's n-th attempt at a name
// is the n-th of the others: one that failed on any rank fails on all, late ones included, and the next one is a new
// one.
#pragma once

#include <string>
#include <vector>

#include "base/deadline.h"
#include "phalanx/phalanx.h"
#include "world/world.h"

namespace phx {

class Attempt {
 public:
  Attempt(World &world, phx_store *store, const std::string &key)
      : world_(world), store_(store), key_(failure_key(key)) {}
  // Where the failure of the attempt with that key is told.
  static std::string failure_key(const std::string &key) { return key + "/failed"; }

  // PHX_OK while nothing is known that makes it useless to wait for the owners of `records` (those not yet read are
  // zero). Else the thread's error names who ended, or what the one that gave up has told.
  phx_status look(const std::vector<PeerRecord> &records);

  // What any build has in its record. False: these bytes are no record.
  static bool read_prefix(const std::string &value, PeerRecord *out);
  // PHX_ERR_ABI: the rank of that record runs another build than this one. Names both.
  phx_status refuse_build(const PeerRecord &theirs) const;

  // Tells the others the thread's error, unless one of them has told of a failure before. Keeps that error.
  void give_up(const std::vector<PeerRecord> &records);

 private:
  phx_status look_at(const PeerRecord &record);
  phx_status read_failure(const std::vector<PeerRecord> &records, Uuid *teller);

  World &world_;
  phx_store *store_;
  const std::string key_;
  bool told_ = false;  // this rank's error is what another one has told
};

}  // namespace phx
