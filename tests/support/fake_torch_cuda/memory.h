// Memory for tensors: kept when it is freed, and given again to the stream that had it, as torch's allocator does.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

namespace fake_torch {

c10::Allocator *allocator();
// The memory is used on this stream as well, and not given away before the stream is through.
void record_stream(const c10::DataPtr &data, const c10::Stream &stream);
// What is made from now on by streams that are captured belongs to another graph than before.
void next_capture();
// Where the host sees this memory, which may also be that of a rank beside this one.
void *host_address(const void *data);

}  // namespace fake_torch
