// Signals and barriers that order streams: what one launch does on one rank.
#pragma once

#include "gpu/meeting.h"

namespace phx::cuda {

namespace {

// The counterparts of phx_symm_put_signal, phx_symm_wait_signal and phx_symm_barrier, by one block on a user's channel.
PHX_DEVICE void barrier(const Launch &launch) { team_barrier(launch); }

PHX_DEVICE void put_signal(const Launch &launch) {
  if (thread_of_block() != 0) return;
  const uint32_t last = phx_team_last(&launch.team, launch.channel, launch.root);
  phx_team_put(&launch.team, launch.channel, launch.root, last + 1);
}

PHX_DEVICE void wait_signal(const Launch &launch) {
  if (thread_of_block() != 0) return;
  uint32_t *const taken = launch.taken + static_cast<size_t>(launch.channel) * launch.team.group_size + launch.root;
  const int32_t status = phx_team_wait(&launch.team, launch.channel, launch.root, *taken + 1, launch.timeout_ns);
  if (status == 0)
    *taken += 1;
  else
    phx_word_put(launch.failed, static_cast<uint32_t>(status));
}

}  // namespace
}  // namespace phx::cuda
