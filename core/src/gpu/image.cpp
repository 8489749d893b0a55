#include "gpu/gpu.h"

#include <cstdio>

#include "base/environment.h"
#include "base/error.h"

#ifdef PHX_CUDA_KERNELS
__asm__(
    ".section .rodata\n"
    ".balign 16\n"
    ".hidden phx_cuda_kernels\n"
    ".globl phx_cuda_kernels\n"
    "phx_cuda_kernels:\n"
    ".incbin \"" PHX_CUDA_KERNELS
    "\"\n"
    ".previous\n");
extern "C" const char phx_cuda_kernels[];
#endif

namespace phx::cuda {
namespace {

struct Image {
  std::string bytes;
  std::string problem;
};

Image read(const char *path) {
  Image image;
  std::FILE *file = std::fopen(path, "rbe");
  if (file == nullptr) {
    image.problem = std::string("PHALANX_CUDA_KERNELS names '") + path + "', which cannot be opened";
    return image;
  }
  char part[1 << 16];
  size_t size = 0;
  while ((size = std::fread(part, 1, sizeof part, file)) != 0) image.bytes.append(part, size);
  if (std::ferror(file) != 0 || image.bytes.empty())
    image.problem = std::string("PHALANX_CUDA_KERNELS names '") + path + "', which cannot be read";
  std::fclose(file);
  return image;
}

}  // namespace

phx_status find_image(const char *operation, const void **image) {
  if (const char *path = read_variable<variable("PHALANX_CUDA_KERNELS")>()) {
    static const Image file = read(path);
    if (!file.problem.empty()) return fail(PHX_ERR_UNSUPPORTED, operation, "%s", file.problem.c_str());
    *image = file.bytes.data();
    return PHX_OK;
  }
#ifdef PHX_CUDA_KERNELS
  *image = phx_cuda_kernels;
  return PHX_OK;
#else
  return fail(PHX_ERR_UNSUPPORTED, operation,
              "this library was built without kernels for GPUs (PHX_CUDA of CMake; or name a file of them in "
              "PHALANX_CUDA_KERNELS)");
#endif
}

}  // namespace phx::cuda
