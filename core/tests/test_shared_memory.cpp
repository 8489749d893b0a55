// Memory that a peer offers: what is mapped, and what is refused because touching it could kill this process.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

#include "base/fd.h"
#include "base/shared_memory.h"
#include "check.h"

namespace {

using phx::Fd;

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr size_t kHugePage = size_t{2} << 20;

Fd memfd(size_t size, int seals, unsigned flags = 0) {
  Fd fd(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING | flags));
  if (!fd.valid() && flags != 0 && (errno == ENOSYS || errno == EINVAL || errno == ENODEV))
    check::skip("the kernel has no memfd of huge pages");
  CHECK(fd.valid());
  CHECK(ftruncate(fd.get(), static_cast<off_t>(size)) == 0);
  CHECK(seals == 0 || fcntl(fd.get(), F_ADD_SEALS, seals) == 0);
  return fd;
}

TEST(a_segment_of_ours_is_taken_and_can_never_shrink_again) {
  Fd fd;
  const size_t size = 4 * phx::page_bytes();
  CHECK_OK(phx::create_segment("test", "test", size, &fd));
  CHECK_OK(phx::verify_segment("test", fd.get(), size));
  CHECK(ftruncate(fd.get(), 0) == -1 && errno == EPERM);
  CHECK(fcntl(fd.get(), F_ADD_SEALS, F_SEAL_WRITE) == -1 && errno == EPERM);
  phx::SharedMappingRef mapping;
  CHECK_OK(phx::map_segment("test", fd.get(), size, size, &mapping));
  CHECK(mapping->bytes()[size - 1] == 0);
}

TEST(memory_that_is_short_or_can_be_shortened_is_refused) {
  const size_t size = 4 * phx::page_bytes();
  CHECK_OK(phx::verify_segment("test", memfd(size, kSeals).get(), size));
  CHECK_FAILS(PHX_ERR_PERMISSION, "announced", phx::verify_segment("test", memfd(size, kSeals).get(), size + 1));
  CHECK_FAILS(PHX_ERR_PERMISSION, "announced", phx::verify_segment("test", memfd(size, kSeals).get(), SIZE_MAX));
  CHECK_FAILS(PHX_ERR_PERMISSION, "not a memfd sealed", phx::verify_segment("test", memfd(size, 0).get(), size));
  CHECK_FAILS(PHX_ERR_PERMISSION, "not a memfd sealed",
              phx::verify_segment("test", memfd(size, F_SEAL_GROW | F_SEAL_SEAL).get(), size));
}

TEST(what_is_no_memfd_is_refused) {
  const size_t size = phx::page_bytes();
  const Fd zero(open("/dev/zero", O_RDWR | O_CLOEXEC));
  CHECK_FAILS(PHX_ERR_PERMISSION, "not a memfd sealed", phx::verify_segment("test", zero.get(), size));
  CHECK_FAILS(PHX_ERR_PERMISSION, "not a memfd sealed", phx::verify_segment("test", -1, size));
}

// Sealed and long enough, and yet its owner can take the page away: a hole gives it back to the pool, and whoever comes
// next empties the pool.
TEST(a_memfd_of_huge_pages_is_refused) {
  const Fd fd = memfd(kHugePage, kSeals, MFD_HUGETLB);
  CHECK_FAILS(PHX_ERR_PERMISSION, "huge pages", phx::verify_segment("test", fd.get(), phx::page_bytes()));
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
