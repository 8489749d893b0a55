// Calls of torch's stable C shim that came after torch 2.11. They are looked up by name, and NULL where torch is older.
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
};

const OptionalShim &optional_shim();

}  // namespace phxt
