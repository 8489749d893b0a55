// Every collective x dtype x op x algorithm x size x kind of buffer x way to wait gives the bits of the reference, on
// every rank. By default a fixed sample of the product; PHALANX_TEST_FULL=1 runs all of it, and PHALANX_TEST_HUGE=1
// calls of more than 2 GiB. PHALANX_ISA limits the kernels to one instruction set.
#include <unistd.h>

#include "members.h"

namespace {

using collective::Case;
using collective::Member;
using collective::Part;
using collective::What;
using collective::Where;

using members::kPlain;
using members::kStreaming;
using members::kThinner;
using members::kTiny;
using members::kUsual;
using members::Setup;
using members::with_processes;
using members::with_threads;
const Setup kSetups[] = {kTiny, kStreaming, kPlain};

// ---- running one case

std::atomic<size_t> parts_checked{0};  // in this process

enum class How { kBlocking, kStarted, kMixed };  // mixed: one rank blocks while the others start
constexpr size_t kHows = 3;

void run(Part &part, const Member &member, const Case &c, How how) {
  part.prepare(member, c);
  const int odd = static_cast<int>(c.seed % static_cast<uint64_t>(member.size()));
  const bool starts = how == How::kStarted || (how == How::kMixed && member.self != odd);
  phx_work *work = nullptr;
  const phx_status issued = part.issue(starts ? &work : nullptr);
  if (issued != PHX_OK) check::failed(__FILE__, __LINE__, describe(c) + ": " + phx_last_error());
  if (starts) {
    const phx_status waited = phx_work_wait(work, 0);
    phx_work_release(work);
    if (waited != PHX_OK) check::failed(__FILE__, __LINE__, describe(c) + ", waited for: " + phx_last_error());
  }
  const std::string wrong = part.check();
  if (!wrong.empty()) check::failed(__FILE__, __LINE__, wrong);
  ++parts_checked;
}

// Takes every `one_in`th of what it is asked about, the same on every rank.
class Sample {
 public:
  explicit Sample(size_t one_in) : one_in_(reference::asked("PHALANX_TEST_FULL") ? 1 : one_in * kThinner) {}
  bool take() { return reference::mix(++index_) % one_in_ == 0; }
  uint64_t seed() const { return reference::mix(index_ * 2 + 1) >> 8; }
  bool full() const { return one_in_ == 1; }

 private:
  size_t index_ = 0;
  const size_t one_in_;
};

// Counts around everything at which something changes.
std::vector<size_t> edges(size_t item, size_t n, size_t chunk) {
  std::vector<size_t> counts = {0, 1, 3};
  const size_t part = std::max<size_t>(chunk / n / 64 * 64, 64);  // of a chunk that is dealt to the ranks
  for (const size_t bytes : {size_t{64}, size_t{4096}, chunk, part, 2 * part, 2 * chunk})
    for (const size_t more : {size_t{0}, size_t{1}, size_t{2}}) counts.push_back(bytes / item + more - 1);
  counts.push_back(2 * part * 3 / item + 5);
  counts.push_back(chunk * 5 / item + 3);
  return counts;
}

struct Pair {
  int32_t dtype, op;
};
std::vector<Pair> defined_pairs() {
  std::vector<Pair> pairs;
  for (int32_t dtype = PHX_DTYPE_F16; dtype <= reference::kLastDtype; ++dtype)
    for (int32_t op = PHX_OP_SUM; op <= reference::kLastOp; ++op)
      if (reference::is_defined(dtype, op)) pairs.push_back({dtype, op});
  return pairs;
}

// ---- the tests

// Every pair through every kind of reduction, by every algorithm.
void reduce_all_pairs(const Member &member, size_t chunk, size_t one_in) {
  struct Form {
    What what;
    int32_t algo;
  };
  constexpr Form kForms[] = {{What::kAllReduce, PHX_ALGO_ONE_SHOT},  {What::kAllReduce, PHX_ALGO_TWO_SHOT},
                             {What::kAllReduce, PHX_ALGO_AUTO},      {What::kReduceScatter, PHX_ALGO_AUTO},
                             {What::kReduceScatterV, PHX_ALGO_AUTO}, {What::kReduce, PHX_ALGO_AUTO}};
  Part part;
  Sample sample(one_in);
  for (const Pair pair : defined_pairs()) {
    const std::vector<size_t> counts = edges(phx_dtype_size(pair.dtype), static_cast<size_t>(member.size()), chunk);
    for (const Form form : kForms) {
      const uint64_t first = reference::mix(static_cast<uint64_t>(pair.dtype * 64 + pair.op)) +
                             static_cast<uint64_t>(form.algo) + static_cast<uint64_t>(form.what);
      // Without the full product: every pair and form once, then a sample of the rest.
      for (size_t i = 0; i < counts.size() * collective::kWheres * 2 * kHows; ++i) {
        const bool taken = sample.take();
        if (i != 0 && !taken) continue;
        uint64_t choice = sample.full() ? i : first + i * 7;
        Case c;
        c.what = form.what;
        c.algo = form.algo;
        c.dtype = pair.dtype;
        c.op = pair.op;
        c.count = counts[choice % counts.size()];
        choice /= counts.size();
        c.where = static_cast<Where>(choice % collective::kWheres);
        choice /= collective::kWheres;
        c.in_place = choice % 2 == 1;
        c.seed = sample.seed();
        c.root = static_cast<int>(c.seed % static_cast<uint64_t>(member.size()));
        if (!possible(c)) c.in_place = false;
        if (!possible(c)) c.where = Where::kUnaligned;
        run(part, member, c, static_cast<How>(choice / 2 % kHows));
      }
    }
  }
}

TEST(every_dtype_and_op_reduces_to_the_reference_bits) {
  for (int n : {1, 2, 3, 4}) {
    const Setup &setup = n % 2 == 0 ? kTiny : kStreaming;
    with_threads(n, setup, [&](const Member &member) { reduce_all_pairs(member, setup.chunk(), 40); });
  }
}

TEST(every_dtype_and_op_reduces_to_the_reference_bits_among_processes) {
  with_processes(2, kStreaming, [](const Member &member) { reduce_all_pairs(member, kStreaming.chunk(), 200); });
}

// Every collective, size, kind of buffer and way to wait; dtypes and ops in turn.
void move_all_sizes(const Member &member, size_t chunk, size_t one_in) {
  const std::vector<Pair> pairs = defined_pairs();
  const auto n = static_cast<size_t>(member.size());
  Part part;
  Sample sample(one_in);
  for (int what = 0; what < collective::kWhats; ++what)
    for (int where = 0; where < collective::kWheres; ++where)
      for (const bool in_place : {false, true})
        for (size_t how = 0; how < kHows; ++how)
          for (const int32_t algo :
               std::initializer_list<phx_algo>{PHX_ALGO_AUTO, PHX_ALGO_ONE_SHOT, PHX_ALGO_TWO_SHOT})
            for (size_t size = 0; size < edges(1, n, chunk).size(); ++size) {
              Case c;
              c.what = static_cast<What>(what);
              c.where = static_cast<Where>(where);
              c.in_place = in_place;
              c.algo = algo;
              // Elsewhere it means nothing, but on symmetric memory that small inputs are not copied either.
              if (c.algo != PHX_ALGO_AUTO && c.what != What::kAllReduce && c.where != Where::kSymmetric) continue;
              if (!possible(c) || !sample.take()) continue;
              c.seed = sample.seed();
              c.dtype = pairs[c.seed % pairs.size()].dtype;
              c.op = pairs[c.seed % pairs.size()].op;
              c.count = edges(phx_dtype_size(c.dtype), n, chunk)[size];
              c.root = static_cast<int>(c.seed / 7 % n);
              c.channel = static_cast<uint32_t>(c.seed / 5 % 3);
              run(part, member, c, static_cast<How>(how));
            }
}

TEST(every_collective_gives_the_reference_bits_at_every_edge) {
  for (int n : {1, 2, 3, 4})
    for (const Setup &setup : kSetups)
      with_threads(n, setup, [&](const Member &member) { move_all_sizes(member, setup.chunk(), n == 1 ? 6 : 2); });
}

TEST(every_collective_gives_the_reference_bits_at_every_edge_among_processes) {
  for (int n : {2, 3})
    for (const Setup &setup : kSetups)
      with_processes(n, setup, [&](const Member &member) { move_all_sizes(member, setup.chunk(), 4); });
}

// With the sizes of chunks that are built in.
TEST(large_inputs_give_the_reference_bits) {
  const std::vector<size_t> sizes = {(128 << 10) - 4, 128 << 10, (128 << 10) + 4, (256 << 10) + 4, 700004, 2500000};
  for (int n : {2, 3})
    with_threads(n, kUsual, [&](const Member &member) {
      Part part;
      Sample sample(3);
      for (int what = 0; what < collective::kWhats; ++what)
        for (const Where where : {Where::kPlain, Where::kUnaligned, Where::kCoalesced, Where::kRecognised})
          for (const size_t bytes : sizes)
            for (const int32_t dtype : {PHX_DTYPE_F32, PHX_DTYPE_BF16}) {
              Case c;
              c.what = static_cast<What>(what);
              c.where = where;
              c.in_place = c.what == What::kBroadcast;
              c.dtype = dtype;
              c.count = bytes / phx_dtype_size(dtype);
              if (!possible(c) || !sample.take()) continue;
              if (collective::in_block(c) && bytes * (static_cast<size_t>(n) + 1) > members::kBlockBytes) continue;
              c.seed = sample.seed();
              c.root = static_cast<int>(c.seed % static_cast<uint64_t>(n));
              run(part, member, c, static_cast<How>(c.seed / 3 % kHows));
            }
      Case c;  // beyond the built-in streaming_bytes
      c.count = (size_t{9} << 20) / 4 + 3;
      run(part, member, c, How::kBlocking);
    });
}

TEST(ranks_as_numerous_as_lines_of_a_slot_share_it) {
  const Setup least = {256, members::tuning_of(256, 4096, uint64_t{1} << 40, 64)};
  with_threads(9, least, [&](const Member &member) { move_all_sizes(member, least.chunk(), 20); });
}

TEST(pairs_that_are_not_defined_are_refused_and_hurt_nobody) {
  with_threads(2, kTiny, [](const Member &member) {
    std::vector<char> in(256), out(256);
    for (int32_t dtype = PHX_DTYPE_F16; dtype <= reference::kLastDtype; ++dtype)
      for (int32_t op = PHX_OP_SUM; op <= reference::kLastOp; ++op) {
        if (reference::is_defined(dtype, op)) continue;
        CHECK_FAILS(PHX_ERR_UNSUPPORTED, "is not defined for",
                    phx_all_reduce(member.group, in.data(), out.data(), 4, dtype, op, nullptr, nullptr));
        CHECK_FAILS(PHX_ERR_UNSUPPORTED, "is not defined for",
                    phx_reduce_scatter(member.group, in.data(), out.data(), 4, dtype, op, nullptr, nullptr));
      }
  });
}

// More bytes and more elements than 31 bits count.
TEST(calls_of_more_than_2_gib_give_the_reference_bits) {
  if (!reference::asked("PHALANX_TEST_HUGE")) check::skip("PHALANX_TEST_HUGE=1 asks for it");
  constexpr size_t kCount = (size_t{1} << 31) + 12345;
  const size_t available = static_cast<size_t>(sysconf(_SC_AVPHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  if (available < 5 * kCount) check::skip("11 GiB of free memory");
  for (const bool symmetric : {false, true})
    ranks::all_zero(ranks::as_processes(2, [&](int rank, phx_world *world) {
      phx_group *group = ranks::make_group(world);
      void *memory = nullptr;
      CHECK_OK(phx_mem_alloc(world, nullptr, kCount, &memory));
      phx_symm *symm = nullptr;
      if (symmetric) CHECK_OK(phx_symm_rendezvous(group, memory, 0, &symm));
      for (const int32_t op : {PHX_OP_SUM, PHX_OP_AVG}) {
        reference::fill(memory, reference::elements(rank, PHX_DTYPE_I8), 1, 5, kCount);
        if (symmetric)
          CHECK_OK(phx_symm_all_reduce(symm, 0, memory, kCount, PHX_DTYPE_I8, op, nullptr, nullptr));
        else
          CHECK_OK(phx_all_reduce(group, memory, memory, kCount, PHX_DTYPE_I8, op, nullptr, nullptr));
        CHECK(reference::matches(memory, reference::reduced({0, 1}, PHX_DTYPE_I8, op), 1, 5, kCount));
      }
      reference::fill(memory, reference::elements(rank, PHX_DTYPE_U8), 1, 9, kCount);
      if (symmetric)
        CHECK_OK(phx_symm_broadcast(symm, 0, kCount, PHX_DTYPE_U8, 1, nullptr, nullptr));
      else
        CHECK_OK(phx_broadcast(group, memory, kCount, PHX_DTYPE_U8, 1, nullptr, nullptr));
      CHECK(reference::matches(memory, reference::elements(1, PHX_DTYPE_U8), 1, 9, kCount));
      CHECK_OK(phx_barrier(group, nullptr, nullptr));
      phx_symm_release(symm);
      CHECK_OK(phx_mem_free(world, memory));
      phx_group_release(group);
    }));
}

}  // namespace

// 77: the host has not got the instruction set that PHALANX_ISA names.
int main(int argc, char **argv) {
  const char *isa = std::getenv("PHALANX_ISA");
  if (isa != nullptr && *isa != '\0') {
    if (!kernel_test::available(isa)) {
      std::printf("skipped: this host has no %s\n", isa);
      return 77;
    }
    if (std::strstr(phx_build_info(), (std::string("\"isa\": \"") + isa + "\"").c_str()) == nullptr) {
      std::printf("PHALANX_ISA is %s, but the library says %s\n", isa, phx_build_info());
      return 1;
    }
  }
  const int status = check::run_all(argc, argv);
  std::printf("%zu parts of collectives were checked, and those of other processes\n", parts_checked.load());
  return status;
}
