// Calls of torch's stable C shim that came after torch 2.11, or that only its CUDA builds have. They are looked up by
// name, and NULL where torch has them not.
#pragma once

#include "torch_shim.h"

namespace phxt {

struct OptionalShim {
  // 2.12: tags of an op, by functions so that their numbers may change.
  AOTITorchError (*library_def_with_tags)(TorchLibraryHandle self, const char *schema, const int32_t *tags,
                                          int32_t count);
  int32_t (*tag_pt2_compliant_tag)();
  int32_t (*tag_needs_contiguous_strides)();
  // 2.13: the text of the thread's last exception, borrowed until the next one.
  const char *(*exception_get_what_without_backtrace)();
  // In libtorch_cuda.so of CUDA builds.
  AOTITorchError (*aoti_get_current_cuda_stream)(int32_t device_index, void **out);
  // The same in two calls, of any build. The stream is owned; its native handle came with 2.13.
  AOTITorchError (*aoti_get_current_stream)(int32_t device_index, StreamHandle *out);
  AOTITorchError (*aoti_delete_stream)(StreamHandle stream);
  AOTITorchError (*stream_native_handle)(StreamHandle stream, void **out);
};

const OptionalShim &optional_shim();

}  // namespace phxt
