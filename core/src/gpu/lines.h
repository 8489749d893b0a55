// all_reduce of small inputs by the LL protocol (launch.h): what one launch does on one rank.
#pragma once

#include "gpu/reduce.h"

namespace phx::cuda {

namespace {

PHX_DEVICE char *line_at(const Launch &launch, uint32_t epoch, int of, int from) {
  const size_t number = line_number(epoch, block_of_grid(), launch.team.group_size, from, thread_of_block());
  return reinterpret_cast<char *>(launch.team.pads[of]) + launch.lines + number * sizeof(Line);
}

PHX_DEVICE bool is_of(const Line &line, uint32_t epoch) {
  return static_cast<uint32_t>(line.half[0] >> 32) == epoch && static_cast<uint32_t>(line.half[1] >> 32) == epoch;
}

// A Line that was never written has 0, so 0 is not an epoch. 1 is left out with it, so that odd and even epochs keep
// alternating, and with them the two Lines of a thread.
PHX_DEVICE uint32_t epoch_after(uint32_t epoch) { return epoch == UINT32_MAX ? 2 : epoch + 1; }

// Whether all threads of a block send in this launch, even those without data. So no Line becomes so old that its epoch
// comes again, 2^32 launches later, when it would count as sent.
PHX_DEVICE bool renews_lines(uint32_t epoch) { return epoch % 65536 < 2; }

// Waits, like phx_team_wait, for the Line that a rank sends to this thread.
PHX_DEVICE int32_t take_line(const Launch &launch, uint32_t epoch, int from, uint64_t *data) {
  const char *const at = line_at(launch, epoch, launch.team.group_rank, from);
  Line line = get_line(at);
  uint64_t begun = 0;
  for (uint32_t looks = 1; !is_of(line, epoch); ++looks) {
    if (looks % 64 == 0) {
      const uint64_t now = phx_private_clock_ns();
      const bool failed = phx_word_get(reinterpret_cast<const uint32_t *>(launch.team.failed) + from) != 0;
      if (failed && !is_of(get_line(at), epoch)) return PHX_ERR_REVOKED;  // the rank may have sent it before it left
      if (begun == 0) begun = now;
      if (now - begun > launch.timeout_ns) return 1 + from;
    }
    phx_private_pause(looks);
    line = get_line(at);
  }
  *data = (line.half[0] & 0xffffffffu) | line.half[1] << 32;
  return 0;
}

// all_reduce of one Line for each thread, which is sent to all ranks, without a barrier. A Line overwrites that of two
// launches before, which the others have read: this rank has completed the launch in between, for which it needed the
// Lines of the others, and they sent those after they had completed the launch before.
template <class E, class Op>
PHX_DEVICE void reduce_lines(const Launch &launch) {
  using Lanes = Several<E, uint64_t>;
  using Raw = typename Lanes::Raw;
  const kernels::Combine<typename Lanes::Acc, Op> op(launch.divisor, launch.scale);
  const int n = launch.team.group_size, self = launch.team.group_rank;
  const uint32_t epoch = epoch_after(launch.epochs[block_of_grid()]);
  const size_t bytes = launch.count * sizeof(Raw), at = thread_of_grid() * sizeof(uint64_t);
  const size_t left = at < bytes ? bytes - at : 0, size = left < sizeof(uint64_t) ? left : sizeof(uint64_t);
  uint64_t mine = 0;
  if (size != 0) std::memcpy(&mine, static_cast<const char *>(launch.in) + at, size);
  if (size != 0 || renews_lines(epoch)) {
    const uint64_t flag = static_cast<uint64_t>(epoch) << 32;
    const Line line{{(mine & 0xffffffffu) | flag, mine >> 32 | flag}};
    for (int i = 1; i < n; ++i) put_line(line_at(launch, epoch, (self + i) % n, self), line);
  }
  if (size != 0) {
    uint64_t data = mine;
    int32_t status = self == 0 ? 0 : take_line(launch, epoch, 0, &data);
    Lanes sum;
    sum.begin(data, op);
    for (int rank = 1; rank < n && status == 0; ++rank) {
      data = mine;
      if (rank != self) status = take_line(launch, epoch, rank, &data);
      sum.add(data, op);
    }
    const uint64_t result = sum.end(op);
    if (status == 0)
      std::memcpy(static_cast<char *>(launch.out) + at, &result, size);
    else
      phx_word_put(launch.failed, static_cast<uint32_t>(status));
  }
  sync_block();  // all threads have read the epoch
  if (thread_of_block() == 0) launch.epochs[block_of_grid()] = epoch;
}

}  // namespace
}  // namespace phx::cuda
