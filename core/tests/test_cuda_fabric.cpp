// Memory of GPUs that goes beyond the host, by fabric handles: on the driver of the host, where that has them, or on
// the one of fake_cuda/ (CTest gives that one). The hosts are processes with nothing in common but a pipe.
#include <array>
#include <cstring>
#include <vector>

#include "check.h"
#include "gpu.h"
#include "pipe.h"
#include "ranks.h"

using gpu::alive;
using gpu::Gpu;
using gpu::kGpu;
using gpu::needs_driver;
using gpu::open_files;

namespace {

using Ticket = std::array<char, PHX_FABRIC_HANDLE_BYTES>;
constexpr size_t kBytes = 100000;
constexpr int kWithout = 42;  // how a process ends whose GPU has no fabric handles

std::vector<unsigned char> pattern(int rank) {
  std::vector<unsigned char> bytes(kBytes);
  for (size_t i = 0; i < kBytes; ++i) bytes[i] = static_cast<unsigned char>(i * 5 + static_cast<size_t>(rank) * 29 + 1);
  return bytes;
}

// What a host of one rank does, in a process of its own. Its wait status.
template <class Body>
pid_t start_host(uint64_t host, const Body &body) {
  const pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid != 0) return pid;
  int code = 1;
  try {
    ranks::Options options;
    options.host_id = host;
    phx_world *world = ranks::make_world(0, 1, nullptr, options);
    code = body(world);
    phx_world_release(world);
  } catch (const std::exception &) {
  }
  _exit(code);
}
int end_of(pid_t pid) {
  int status = -1;
  waitpid(pid, &status, 0);
  return status;
}

// The world of one rank, in this process.
template <class Body>
void alone(const Body &body) {
  needs_driver();
  ranks::as_threads(1, [&](int, phx_world *world) { body(world); });
}
// A block with a handle.
void *exported(phx_world *world, Ticket *ticket) {
  void *block = nullptr;
  CHECK_OK(phx_mem_alloc(world, &kGpu, kBytes, &block));
  CHECK_OK(phx_mem_export_fabric(world, block, ticket->data()));
  return block;
}
void needs_fabric() {
  needs_driver();
  bool has = false;
  alone([&](phx_world *world) {
    void *block = nullptr;
    Ticket ticket;
    CHECK_OK(phx_mem_alloc(world, &kGpu, 1, &block));
    has = phx_mem_export_fabric(world, block, ticket.data()) == PHX_OK;
    CHECK_OK(phx_mem_free(world, block));
  });
  if (!has) check::skip("a GPU with fabric handles");
}

}  // namespace

// First: a forked child must find a driver that was not started.  C2
TEST(hosts_without_a_group_share_memory_of_gpus) {
  if (gpu::symbol<int()>("cuInit") == nullptr) check::skip("libcuda.so.1");
  const Pipe there, back;
  const pid_t owner = start_host(101, [&](phx_world *world) {
    void *block = nullptr;
    Ticket ticket{};
    CHECK_OK(phx_mem_alloc(world, &kGpu, kBytes, &block));
    const bool has = phx_mem_export_fabric(world, static_cast<char *>(block) + 7, ticket.data()) == PHX_OK;
    Gpu().write(block, pattern(0));
    there.send(ticket);
    if (!has) return kWithout;
    back.receive<char>();  // it is mapped and written to
    CHECK(Gpu().read(block, kBytes) == pattern(1));
    Gpu().write(block, pattern(2));
    CHECK_OK(phx_mem_free(world, block));
    there.send('f');
    return 0;
  });
  const pid_t other = start_host(102, [&](phx_world *world) {
    const Ticket ticket = there.receive<Ticket>();
    if (ticket == Ticket{}) return kWithout;
    void *block = nullptr;
    CHECK_OK(phx_mem_import_fabric(world, &kGpu, ticket.data(), ticket.size(), &block));
    phx_mem_info info{};
    info.struct_size = sizeof info;
    CHECK_OK(phx_mem_find(world, static_cast<char *>(block) + 50, &info));
    CHECK(info.base == block && info.size == kBytes && info.live == 1 && info.device.type == PHX_DEVICE_CUDA);
    CHECK(Gpu().read(block, kBytes) == pattern(0));
    Gpu().write(block, pattern(1));
    back.send('w');
    there.receive<char>();  // its owner has freed it: the memory lives on here
    CHECK(Gpu().read(block, kBytes) == pattern(2));
    CHECK_OK(phx_mem_free(world, block));
    CHECK_FAILS(PHX_ERR_NOT_FOUND, "not in memory that phx_mem_alloc", phx_mem_find(world, block, &info));
    return 0;
  });
  const int first = end_of(owner), second = end_of(other);
  if (WIFEXITED(first) && WEXITSTATUS(first) == kWithout) check::skip("a GPU with fabric handles");
  CHECK(first == 0 && second == 0);
}

TEST(handles_leave_nothing_behind) {
  needs_fabric();
  if (alive() < 0) check::skip("the fake driver, which counts");
  CHECK(alive() == 0);
  const size_t before = open_files();
  alone([](phx_world *world) {
    Ticket ticket{};
    void *const block = exported(world, &ticket);
    void *first = nullptr, *second = nullptr;
    CHECK_OK(phx_mem_import_fabric(world, &kGpu, ticket.data(), ticket.size(), &first));
    CHECK_OK(phx_mem_import_fabric(world, &kGpu, ticket.data(), ticket.size(), &second));
    CHECK(first != second && first != block);
    CHECK_OK(phx_mem_free(world, first));
    CHECK_OK(phx_mem_free(world, block));
    // The world frees the second with itself.
  });
  CHECK(alive() == 0);
  CHECK(open_files() == before);
}

TEST(a_driver_that_gives_no_handles_is_used_without) {
  needs_driver();
  if (alive() < 0) check::skip("the fake driver, which does as it is told");
  struct Without {
    const char *variable;
    const char *words;
  };
  for (const Without without :
       {Without{"FAKE_CUDA_FABRIC", "CUDA device 0, or its driver, has no fabric handles"},
        Without{"FAKE_CUDA_IMEX",
                "no fabric handles of CUDA device 0 (CUDA_ERROR_NOT_PERMITTED): the host needs the "
                "service nvidia-imex"}}) {
    setenv(without.variable, "0", 1);
    ranks::as_threads(2, [&](int rank, phx_world *world) {
      phx_group *group = ranks::make_group(world);
      void *block = nullptr, *mapped = nullptr;
      Ticket ticket{};
      CHECK_OK(phx_mem_alloc(world, &kGpu, kBytes, &block));
      CHECK_FAILS(PHX_ERR_UNSUPPORTED, without.words, phx_mem_export_fabric(world, block, ticket.data()));
      CHECK(ticket == Ticket{});
      Gpu().write(block, pattern(rank));  // by descriptors it is shared as ever
      phx_symm *symm = nullptr;
      CHECK_OK(phx_symm_rendezvous(group, block, 0, &symm));
      CHECK_OK(phx_symm_barrier(symm, 0, 0));
      CHECK(Gpu().read(phx_symm_buffer(symm, 1 - rank), kBytes) == pattern(1 - rank));
      CHECK_OK(phx_symm_barrier(symm, 0, 0));
      std::memcpy(ticket.data(), "phxfabrc\1\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0", 32);
      CHECK_FAILS(PHX_ERR_UNSUPPORTED, without.words,
                  phx_mem_import_fabric(world, &kGpu, ticket.data(), ticket.size(), &mapped));
      CHECK(mapped == nullptr);
      phx_symm_release(symm);
      CHECK_OK(phx_mem_free(world, block));
      phx_group_release(group);
    });
    unsetenv(without.variable);
    CHECK(alive() == 0);
  }
}

TEST(a_call_of_the_driver_that_fails_is_named) {
  needs_fabric();
  if (alive() < 0) check::skip("the fake driver, which fails on demand");
  alone([](phx_world *world) {
    Ticket ticket{}, other{};
    void *const block = exported(world, &ticket);
    void *mapped = nullptr;
    setenv("FAKE_CUDA_FAIL", "cuMemExportToShareableHandle", 1);
    CHECK_FAILS(PHX_ERR_DEVICE, "cuMemExportToShareableHandle", phx_mem_export_fabric(world, block, other.data()));
    for (const char *function : {"cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"}) {
      setenv("FAKE_CUDA_FAIL", function, 1);
      CHECK_FAILS(PHX_ERR_DEVICE, function, phx_mem_import_fabric(world, &kGpu, ticket.data(), ticket.size(), &mapped));
    }
    unsetenv("FAKE_CUDA_FAIL");
    CHECK_OK(phx_mem_free(world, block));
    // What the handle stands for is gone.
    CHECK_FAILS(PHX_ERR_DEVICE, "cuMemImportFromShareableHandle",
                phx_mem_import_fabric(world, &kGpu, ticket.data(), ticket.size(), &mapped));
    CHECK(mapped == nullptr);
  });
  CHECK(alive() == 0);
}

TEST(wrong_handles_and_blocks_are_refused) {
  needs_fabric();
  alone([](phx_world *world) {
    Ticket ticket{};
    void *const block = exported(world, &ticket);
    void *mapped = nullptr, *of_host = nullptr;
    const auto import = [&](const Ticket &given, size_t size = PHX_FABRIC_HANDLE_BYTES,
                            const phx_device &device = kGpu) {
      return phx_mem_import_fabric(world, &device, given.data(), size, &mapped);
    };
    CHECK_FAILS(PHX_ERR_INVALID, "95 bytes instead of 96", import(ticket, 95));
    CHECK_FAILS(PHX_ERR_INVALID, "0 bytes instead of 96", phx_mem_import_fabric(world, &kGpu, nullptr, 96, &mapped));
    Ticket wrong = ticket;
    wrong[0] = 'x';
    CHECK_FAILS(PHX_ERR_INVALID, "not a handle of phx_mem_export_fabric", import(wrong));
    wrong = ticket;
    wrong[8] = 9;
    CHECK_FAILS(PHX_ERR_ABI, "layout version 9, but this library reads 1", import(wrong));
    wrong = ticket;
    std::memset(&wrong[24], 0, 8);
    CHECK_FAILS(PHX_ERR_INVALID, "does not say how large", import(wrong));
    const uint64_t more = uint64_t{1} << 40;
    wrong = ticket;
    std::memcpy(&wrong[24], &more, 8);  // the driver knows how much there is
    CHECK_FAILS(PHX_ERR_DEVICE, "cuMem", import(wrong));
    CHECK_FAILS(PHX_ERR_INVALID, "there is no CUDA device 99", import(ticket, 96, {PHX_DEVICE_CUDA, 99}));
    CHECK_FAILS(PHX_ERR_UNSUPPORTED, "not 'memfd'", import(ticket, 96, {PHX_DEVICE_CPU, 0}));
    CHECK_FAILS(PHX_ERR_INVALID, "device or out is NULL",
                phx_mem_import_fabric(world, nullptr, ticket.data(), 96, &mapped));
    CHECK(mapped == nullptr);

    CHECK_FAILS(PHX_ERR_INVALID, "handle is NULL", phx_mem_export_fabric(world, block, nullptr));
    CHECK_FAILS(PHX_ERR_NOT_FOUND, "was not allocated by phx_mem_alloc",
                phx_mem_export_fabric(world, &wrong, wrong.data()));
    CHECK_OK(phx_mem_alloc(world, nullptr, 64, &of_host));
    CHECK_FAILS(PHX_ERR_UNSUPPORTED, "memory is not on a GPU", phx_mem_export_fabric(world, of_host, wrong.data()));
    CHECK_OK(phx_mem_free(world, of_host));

    // What came by a handle is another's: it is neither exported nor offered.
    CHECK_OK(import(ticket));
    CHECK_FAILS(PHX_ERR_INVALID, "belongs to another rank", phx_mem_export_fabric(world, mapped, wrong.data()));
    phx_group *group = ranks::make_group(world);
    phx_symm *symm = nullptr;
    CHECK_FAILS(PHX_ERR_INVALID, "another rank's memory", phx_symm_rendezvous(group, mapped, 0, &symm));
    CHECK_OK(phx_symm_rendezvous(group, block, 0, &symm));
    phx_symm_release(symm);
    phx_group_release(group);
    CHECK_OK(phx_mem_free(world, mapped));
    CHECK_OK(phx_mem_free(world, block));
  });
}

int main(int argc, char **argv) { return check::run_all(argc, argv); }
