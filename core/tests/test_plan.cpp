// How many rounds an operation takes, and in what chunks: decided before anything moves, alike on all ranks.
#include "check.h"
#include "group/lane.h"
#include "ops/operation.h"

namespace {

uint32_t rounds_of_broadcast(size_t bytes, const phx::Tuning &tuning) {
  alignas(64) char memory[64];  // never touched: a plan only asks how large things are
  phx::ControlHeader layout{};
  layout.slot_bytes = size_t{256} << 10;
  phx::Lane lane;
  lane.open({{memory, nullptr}, {memory, nullptr}}, 0, layout, true, false, 0);
  phx::Buffers buffers;
  buffers.in = buffers.out = memory;
  buffers.count = bytes;
  buffers.item = 1;
  const phx::Plan plan{lane, tuning, true};
  return phx::make_broadcast(plan, buffers, 0)->rounds;
}

TEST(what_moves_one_way_takes_two_rounds_only_where_they_pay) {
  const phx::Tuning tuning = phx::builtin_tuning(2, 2);
  const size_t pays = 16 * tuning.one_shot_bytes;
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{63}, size_t{65}, size_t{100}, size_t{1000}, pays - 1})
    CHECK(rounds_of_broadcast(bytes, tuning) == 1);
  for (const size_t bytes : {pays, pays + 1, pays + 65, tuning.chunk_bytes, 2 * tuning.chunk_bytes})
    CHECK(rounds_of_broadcast(bytes, tuning) == 2);
  CHECK(rounds_of_broadcast(8 * tuning.chunk_bytes, tuning) == 8);
  phx::Tuning never = tuning;
  never.one_shot_bytes = uint64_t{1} << 62;
  CHECK(rounds_of_broadcast(tuning.chunk_bytes, never) == 1);
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
