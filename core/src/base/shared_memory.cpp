#include "base/shared_memory.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>

#include "base/error.h"
#include "base/sanitizers.h"

#ifdef PHX_SANITIZES_THREADS
#include <map>
#include <mutex>
#endif

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace phx {
namespace {

#ifdef PHX_SANITIZES_THREADS
// ThreadSanitizer knows memory by address. With ranks as threads, two mappings of one memfd would hide every race
// between ranks, so in such builds all ranks of the process share one mapping per inode.
struct AliasTable {
  std::mutex mutex;
  std::map<ino_t, std::weak_ptr<SharedMapping>> by_inode;
};
AliasTable &aliases() {
  static AliasTable *table = new AliasTable;
  return *table;
}
#endif

constexpr size_t kHugePage = size_t{2} << 20;

}  // namespace

SharedMapping::~SharedMapping() {
  if (base != nullptr) munmap(base, size);
}

size_t page_bytes() {
  static const size_t size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

size_t round_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

phx_status create_segment(const char *operation, const char *label, size_t size, Fd *out) {
  const size_t physical = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * page_bytes();
  if (size > physical)
    return fail(PHX_ERR_NO_MEMORY, operation,
                "%zu bytes were asked for, but this host has %zu bytes of memory; ask for less", size, physical);
  Fd fd(memfd_create(label, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return fail_errno(errno, operation, "memfd_create failed");
  if (ftruncate(fd.get(), static_cast<off_t>(size)) != 0)
    return fail_errno(errno, operation, "could not get %zu bytes of shared memory", size);
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    return fail_errno(errno, operation, "could not seal the memfd");
  *out = std::move(fd);
  return PHX_OK;
}

phx_status verify_segment(const char *operation, int fd, size_t size) {
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0)
    return fail(PHX_ERR_PERMISSION, operation,
                "a peer sent a file that is not a memfd sealed against shrinking; it was refused");
  // A sealed memfd of huge pages (hugetlbfs) can still fault: its owner can punch a hole into it and use up the pool.
  struct statfs system;
  if (fstatfs(fd, &system) != 0) return fail_errno(errno, operation, "fstatfs of a peer's memory failed");
  if (system.f_type != TMPFS_MAGIC)
    return fail(PHX_ERR_PERMISSION, operation, "a peer sent a memfd of reserved huge pages; refused");
  struct stat info;
  if (fstat(fd, &info) != 0) return fail_errno(errno, operation, "fstat of a peer's memory failed");
  if (info.st_size < 0 || static_cast<uint64_t>(info.st_size) < size)
    return fail(PHX_ERR_PERMISSION, operation, "a peer announced %zu bytes and sent memory of %lld; refused", size,
                static_cast<long long>(info.st_size));
  return PHX_OK;
}

phx_status populate(const char *operation, void *begin, size_t bytes) {
  const uintptr_t first = reinterpret_cast<uintptr_t>(begin) / page_bytes() * page_bytes();
  const size_t span = round_up(reinterpret_cast<uintptr_t>(begin) + bytes - first, page_bytes());
  if (bytes == 0 || madvise(reinterpret_cast<void *>(first), span, MADV_POPULATE_WRITE) == 0) return PHX_OK;
  // EFAULT: touching a page would raise SIGBUS, for example because the limit of committed memory is reached. Other
  // errors are ignored, such as EINVAL from a kernel before 5.14.
  if (errno != ENOMEM && errno != EFAULT) return PHX_OK;
  return fail(PHX_ERR_NO_MEMORY, operation, "the host ran out of memory for %zu bytes", bytes);
}

phx_status map_segment(const char *operation, int fd, size_t size, size_t prefault_bytes, SharedMappingRef *out) {
#ifdef PHX_SANITIZES_THREADS
  struct stat info;
  if (fstat(fd, &info) != 0) return fail_errno(errno, operation, "fstat failed");
  std::lock_guard<std::mutex> lock(aliases().mutex);
  if (SharedMappingRef known = aliases().by_inode[info.st_ino].lock(); known && known->size >= size) {
    *out = known;
    return PHX_OK;
  }
#endif
  const auto mapping = std::make_shared<SharedMapping>();
  void *base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) return fail_errno(errno, operation, "could not map %zu bytes of shared memory", size);
  mapping->base = base;
  mapping->size = size;
#ifdef MADV_HUGEPAGE
  // Best effort: the host must allow huge pages (shmem_enabled). They are worth a few percent and make the first touch
  // faster. A mapping that is not prefaulted gets none: each first touch would use up a whole huge page.
  if (prefault_bytes >= kHugePage) madvise(base, size, MADV_HUGEPAGE);
#endif
  // The owner maps the segment first, on a core where it computes, so the pages come from its NUMA node.
  PHX_TRY(populate(operation, base, prefault_bytes));
  *out = mapping;
#ifdef PHX_SANITIZES_THREADS
  aliases().by_inode[info.st_ino] = *out;
#endif
  return PHX_OK;
}

}  // namespace phx
