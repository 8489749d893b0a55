// The same events for torch.ops.phalanx.*, whose kernels know nothing of torch but its stable ABI, and for Python.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace phalanx {

// Adds to the module:
//   show_ops(set_around, group_find, group_get_info, group_release): addresses of functions of the loaded libraries.
//     From then on ops of torch.ops.phalanx on groups have events; also those that compiled graphs call.
//   is_recorded(): whether a profiler or an observer runs.
//   Recording(...): the event, from __enter__ to __exit__.
void add_recording(pybind11::module_ &module);

}  // namespace phalanx
