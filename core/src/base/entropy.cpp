#include "base/entropy.h"

#include <fcntl.h>
#include <sys/random.h>
#include <unistd.h>

#include <cerrno>

#include "base/fd.h"

namespace phx {
namespace {

// Calls `read_some(at, left)` until `data` is full. False, with errno set, if a call fails or returns 0.
template <class Read>
bool fill(void *data, size_t size, Read read_some) {
  char *at = static_cast<char *>(data);
  while (size > 0) {
    const ssize_t got = read_some(at, size);
    if (got < 0 && errno == EINTR) continue;
    if (got == 0) errno = EIO;
    if (got <= 0) return false;
    at += got;
    size -= static_cast<size_t>(got);
  }
  return true;
}

}  // namespace

bool fill_random(void *data, size_t size) {
  if (fill(data, size, [](char *at, size_t left) { return getrandom(at, left, 0); })) return true;
  // A container may refuse getrandom (EPERM), and an old kernel may lack it (ENOSYS).
  const int refusal = errno;
  const Fd device(open("/dev/urandom", O_RDONLY | O_CLOEXEC));
  if (device.valid() && fill(data, size, [&](char *at, size_t left) { return read(device.get(), at, left); }))
    return true;
  errno = refusal;
  return false;
}

}  // namespace phx
