// Copies and exchanges of any length and alignment: what arrives, and that nothing around it changes.
#include <algorithm>
#include <random>
#include <vector>

#include "check.h"
#include "kernels/copies.h"

namespace {

using Bytes = std::vector<char>;

constexpr size_t kEdge = 192;

Bytes random_bytes(size_t size) {
  static std::mt19937_64 random(5);
  Bytes bytes(size);
  for (char &byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

// Around every length at which another way of copying takes over.
std::vector<size_t> lengths() {
  std::vector<size_t> found{1, 63, 64, 65, 127, 4096};
  for (const size_t kib : {size_t{8}, size_t{16}, size_t{64}, size_t{96}, size_t{256}}) {
    const size_t at = kib << 10;
    for (const size_t length : {at - 65, at - 1, at, at + 1, at + 64, at + 8192 + 3}) found.push_back(length);
  }
  return found;
}

template <class Function>
void expect_copied(const Function &copy) {
  for (const size_t size : lengths())
    for (const size_t to_offset : {size_t{0}, size_t{1}, size_t{40}})
      for (const size_t from_offset : {size_t{0}, size_t{64}, size_t{7}}) {
        const Bytes from = random_bytes(size + 2 * kEdge);
        Bytes to = random_bytes(size + 2 * kEdge), expected = to;
        std::copy_n(from.begin() + from_offset, size, expected.begin() + to_offset);
        copy(to.data() + to_offset, from.data() + from_offset, size);
        CHECK(to == expected);
      }
}

}  // namespace

using phx::kernels::Copy;
using phx::kernels::CopyUse;

// Calls `body` once for each candidate that may serve `use`.
template <class Body>
void for_each_candidate(CopyUse use, const Body &body) {
  int count = 0;
  for (size_t i = 0; i < phx::kernels::kCopyCount; ++i) {
    if (!phx::kernels::copy_is_for(static_cast<Copy>(i), use)) continue;
    body(static_cast<Copy>(i));
    ++count;
  }
  CHECK(count > 0);
}

TEST(every_candidate_moves_its_bytes_and_no_others) {
  for (size_t use = 0; use < static_cast<size_t>(CopyUse::kExchange); ++use)
    for_each_candidate(static_cast<CopyUse>(use), [](Copy copy) {
      expect_copied([=](void *to, const void *from, size_t size) { phx::kernels::copy_with(copy, to, from, size); });
    });
}

TEST(copies_by_the_fastest_move_their_bytes_and_no_others) {
  for (const CopyUse use :
       {CopyUse::kAny, CopyUse::kPut, CopyUse::kPutOneWay, CopyUse::kReadOneWay, CopyUse::kAroundCache})
    expect_copied([=](void *to, const void *from, size_t size) { phx::kernels::copy_for(use, to, from, size); });
}

void expect_exchanged(Copy copy) {
  for (const bool streaming : {false, true})
    for (const size_t size : lengths())
      for (const size_t offset : {size_t{0}, size_t{1}, size_t{40}}) {
        const Bytes next = random_bytes(size + 2 * kEdge);
        Bytes slot = random_bytes(size + 2 * kEdge), out = random_bytes(size + 2 * kEdge);
        Bytes slot_after = slot, out_after = out;
        std::copy_n(slot.begin() + kEdge, size, out_after.begin() + offset);
        std::copy_n(next.begin() + offset, size, slot_after.begin() + kEdge);
        phx::kernels::exchange_with(copy, out.data() + offset, slot.data() + kEdge, next.data() + offset, size,
                                    streaming);
        CHECK(out == out_after);
        CHECK(slot == slot_after);
      }
}

TEST(an_exchange_takes_what_lies_there_and_leaves_what_comes_next) {
  for_each_candidate(CopyUse::kExchange, expect_exchanged);
}

TEST(an_exchange_for_nothing_leaves_what_lies_there) {
  for_each_candidate(CopyUse::kExchange, [](Copy copy) {
    for (const bool streaming : {false, true})
      for (const size_t size : lengths()) {
        const Bytes before = random_bytes(size);
        Bytes slot = before, out(size);
        phx::kernels::exchange_with(copy, out.data(), slot.data(), nullptr, size, streaming);
        CHECK(out == before);
        CHECK(slot == before);
      }
  });
}

int main(int argc, char **argv) { return check::run_all(argc, argv); }
