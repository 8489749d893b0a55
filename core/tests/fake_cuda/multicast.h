// Multicast objects of the driver without a GPU: which GPUs belong to one, and which memory they have bound to it, in a
// memfd that all processes share. Nothing is multicast: kernels of the host go over the blocks by themselves, and the
// driver checks that these are what is bound.
#pragma once

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <set>

namespace fake_cuda {

constexpr size_t kMulticastUnit = size_t{128} << 10;
constexpr const char *kSwitchName = "fake-multicast";
constexpr int kMostGpus = 64;

// Which memfd it is.
inline ino_t number_of(int fd) {
  struct stat about {};
  return fstat(fd, &about) == 0 ? about.st_ino : 0;
}

struct Switch {
  size_t devices;
  size_t size;
  std::atomic<uint64_t> added;
  std::atomic<ino_t> memory[kMostGpus];  // by device

  struct Unmap {
    void operator()(Switch *mapped) const { munmap(mapped, sizeof *mapped); }
  };
  static std::unique_ptr<Switch, Unmap> of(int fd) {
    void *const at = mmap(nullptr, sizeof(Switch), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return std::unique_ptr<Switch, Unmap>(at == MAP_FAILED ? nullptr : static_cast<Switch *>(at));
  }

  bool add(int device) {
    const uint64_t bit = uint64_t{1} << device;
    return device < kMostGpus && !complete() && (added.fetch_or(bit) & bit) == 0;
  }
  bool complete() const { return static_cast<size_t>(__builtin_popcountll(added.load())) == devices; }
  bool bind(int device, ino_t number) {
    ino_t none = 0;
    return (added.load() >> device & 1) != 0 && memory[device].compare_exchange_strong(none, number);
  }
  void unbind(int device) { memory[device].store(0); }
  std::set<ino_t> bound() const {
    std::set<ino_t> all;
    for (const auto &one : memory)
      if (one.load() != 0) all.insert(one.load());
    return all;
  }
};

inline int make_switch(size_t devices, size_t size) {
  const int fd = memfd_create(kSwitchName, MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, sizeof(Switch)) != 0) return -1;
  const auto made = Switch::of(fd);  // zeros, but for these
  made->devices = devices;
  made->size = size;
  return fd;
}

}  // namespace fake_cuda
