// The rings in shared memory: what they hold, and that nothing which a broken peer writes there does harm.
#include <cstring>
#include <random>
#include <vector>

#include "group/control.h"
#include "messages.h"
#include "p2p/ring.h"

namespace {

using messages::letters;
using messages::says;

struct Ring {
  std::vector<char> memory = std::vector<char>(sizeof(phx::RingHeader) + phx::kMinRingBytes + 64);
  char *base() { return memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64; }
  phx::RecordHeader *record() { return reinterpret_cast<phx::RecordHeader *>(base() + sizeof(phx::RingHeader)); }
  phx::RingHeader *header() { return reinterpret_cast<phx::RingHeader *>(base()); }
};

TEST(a_ring_takes_records_until_it_is_full_and_gives_them_back_in_order) {
  Ring ring;
  phx::RingWriter writer;
  phx::RingReader reader;
  writer.open(ring.base(), phx::kMinRingBytes, false);
  reader.open(ring.base(), phx::kMinRingBytes, false);
  std::mt19937 random(1);
  const std::vector<char> data = letters(0, phx::kPieceBytes + 1000);
  uint64_t put = 0, got = 0;  // messages, each in pieces
  size_t written = 0, read = 0;
  const auto size = [&](uint64_t i) { return static_cast<size_t>(i * i * 37 % data.size()); };
  phx::Record record;
  CHECK(reader.peek(&record) == phx::RingResult::kNothing);
  for (int i = 0; i < 20000; ++i) {
    if (random() % 2 == 0) {
      size_t taken = 0;
      const phx::Record next{phx::RecordKind::kData,
                             {static_cast<uint32_t>(put), PHX_DTYPE_U8, size(put)},
                             written,
                             size(put) - written,
                             data.data() + written};
      const phx::RingResult result = writer.put(next, &taken);
      CHECK(result != phx::RingResult::kBroken);
      CHECK(result == phx::RingResult::kOk || put > got);  // an empty ring has room
      if (result == phx::RingResult::kOk && (written += taken) == size(put)) ++put, written = 0;
    } else {
      const phx::RingResult result = reader.peek(&record);
      CHECK(result != phx::RingResult::kBroken);
      if (result != phx::RingResult::kOk) continue;
      CHECK(record.head.tag == static_cast<uint32_t>(got) && record.offset == read);
      CHECK(std::memcmp(record.data, data.data() + read, record.bytes) == 0);
      reader.release(record);
      if ((read += record.bytes) == size(got)) ++got, read = 0;
    }
  }
  CHECK(got > 1000);
}

TEST(a_ring_refuses_what_no_writer_and_no_reader_can_have_written) {
  const char byte = 1;
  size_t taken = 0;
  const phx::Record small{phx::RecordKind::kEager, {1, PHX_DTYPE_U8, 1}, 0, 1, &byte};
  phx::Record record;
  const auto broken = [&](auto spoil) {
    Ring ring;
    phx::RingWriter writer;
    phx::RingReader reader;
    writer.open(ring.base(), phx::kMinRingBytes, true);
    reader.open(ring.base(), phx::kMinRingBytes, true);
    CHECK(writer.put(small, &taken) == phx::RingResult::kOk);
    spoil(ring);
    return reader.peek(&record) == phx::RingResult::kBroken;
  };
  CHECK(!broken([](Ring &) {}));
  CHECK(broken([](Ring &ring) { ring.record()->flag = 77; }));
  CHECK(broken([](Ring &ring) { ring.record()->bytes = phx::kMinRingBytes; }));
  CHECK(broken([](Ring &ring) { ring.record()->bytes = 0xffffffffu; }));
  for (uint32_t lie : {5000u, 0x80000000u, 0xffffffffu}) {
    Ring ring;
    phx::RingWriter writer;
    writer.open(ring.base(), phx::kMinRingBytes, true);
    CHECK(writer.put(small, &taken) == phx::RingResult::kOk);
    ring.header()->taken = lie;
    const std::vector<char> large(phx::kPieceBytes);
    phx::RingResult result = phx::RingResult::kOk;
    for (int i = 0; i < 100 && result == phx::RingResult::kOk; ++i)
      result =
          writer.put({phx::RecordKind::kData, {1, PHX_DTYPE_U8, large.size()}, 0, large.size(), large.data()}, &taken);
    CHECK(result == phx::RingResult::kBroken);
  }
}

TEST(credit_is_bounded_and_goes_on_across_2_to_the_32) {
  Ring ring;
  phx::RingWriter writer;
  phx::RingReader reader;
  writer.open(ring.base(), phx::kMinRingBytes, true);
  reader.open(ring.base(), phx::kMinRingBytes, true);
  constexpr size_t kCredit = size_t{1} << 20;
  constexpr uint32_t kCost = 300 << 10;  // three fit
  for (uint64_t all = 0; all < uint64_t{5} << 32; all += 3 * uint64_t{kCost}) {
    for (int i = 0; i < 3; ++i) {
      CHECK(writer.charge(kCost, kCredit) == phx::RingResult::kOk);
      CHECK(reader.charge(kCost, kCredit));
    }
    CHECK(writer.charge(kCost, kCredit) == phx::RingResult::kNothing);
    reader.give_back(3 * kCost);
  }
  CHECK(!reader.charge(kCredit + 1, kCredit));
  ring.header()->returned.fetch_add(kCost);  // more than was used
  CHECK(writer.charge(kCredit, kCredit) == phx::RingResult::kBroken);
}

// The ring from rank 0 to rank 1 of the only group of this process, found in its mappings.
phx::RecordHeader *first_record_for_rank_1() {
  FILE *file = fopen("/proc/self/maps", "r");
  CHECK(file != nullptr);
  char line[512];
  phx::RecordHeader *found = nullptr;
  while (found == nullptr && fgets(line, sizeof line, file) != nullptr) {
    unsigned long base = 0;
    if (std::strstr(line, "phalanx-group") == nullptr || std::sscanf(line, "%lx-", &base) != 1) continue;
    const auto *header = reinterpret_cast<const phx::ControlHeader *>(base);
    if (header->magic != phx::kControlMagic || header->group_rank != 1) continue;
    found = reinterpret_cast<phx::RecordHeader *>(base + header->lanes_end() + sizeof(phx::MessageArea) +
                                                  sizeof(phx::RingHeader));
  }
  fclose(file);
  CHECK(found != nullptr);
  return found;
}

TEST(broken_shared_memory_fails_the_group_and_nothing_else) {
  const auto spoil = [](auto write) {
    ranks::as_threads(2, [&](int rank, phx_world *world) {
      phx_group *group = ranks::make_group(world);
      char x = 0;
      if (rank == 0) {
        phx::RecordHeader *record = first_record_for_rank_1();
        record->bytes = 1;
        record->tag = 5;
        record->dtype = PHX_DTYPE_U8;
        record->kind = phx::RecordKind::kEager;
        record->count = 1;
        record->offset = 0;
        write(record);
        uint32_t flag = 1;
        if (record->flag.load() != 0) flag = record->flag.load();
        record->flag.store(flag, std::memory_order_release);
        auto *area =
            reinterpret_cast<phx::MessageArea *>(reinterpret_cast<char *>(record) - sizeof(phx::RingHeader)) - 1;
        area->doorbell.fetch_add(1);  // rank 1 may sleep by now
        phx::wake_all(area->doorbell);
      }
      const phx_status status = phx_recv(group, &x, 1, PHX_DTYPE_U8, 1 - rank, 5, nullptr, nullptr);
      CHECK(status == PHX_ERR_INTERNAL && says("the memory shared with rank 0 (pid") && says("is broken"));
      CHECK_FAILS(PHX_ERR_REVOKED, "rank 0", phx_barrier(group, nullptr, nullptr));
      phx_group_release(group);
    });
  };
  spoil([](phx::RecordHeader *record) { record->flag = 12345; });
  spoil([](phx::RecordHeader *record) { record->bytes = 1u << 20; });
  spoil([](phx::RecordHeader *record) { record->bytes = 2; });
  spoil([](phx::RecordHeader *record) { record->bytes = 0; });
  spoil([](phx::RecordHeader *record) { record->offset = 1; });
  spoil([](phx::RecordHeader *record) { record->dtype = 99; });
  spoil([](phx::RecordHeader *record) { record->count = UINT64_MAX; });
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
