#include "base/entropy.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "base/error.h"
#include "base/fd.h"

namespace phx {

phx_status fill_random(const char *operation, void *data, size_t size) {
  if (getentropy(data, size) == 0) return PHX_OK;
  // A container may refuse getrandom (EPERM), and an old kernel may lack it (ENOSYS).
  const int refusal = errno;
  const Fd device(open("/dev/urandom", O_RDONLY | O_CLOEXEC));
  // It gives up to 256 bytes in one piece; no signal interrupts that.
  if (device.valid() && read(device.get(), data, size) == static_cast<ssize_t>(size)) return PHX_OK;
  return fail_errno(refusal, operation,
                    "neither getrandom(2) nor /dev/urandom gives random bytes; does a seccomp profile refuse them?");
}

}  // namespace phx
