// Our own prototypes of the calls of torch's stable C shim that this library uses (torch/csrc/stable/c/shim.h, and in
// torch/csrc/inductor/aoti_torch c/shim.h and generated/c_shim_cpu.h), so that building needs no torch. All of them
// exist in torch 2.11 and later; what came after 2.11 is looked up by name in optional_shim.h. A test compares each
// type with the installed headers.
#pragma once

#include <cstddef>
#include <cstdint>

#ifndef PHXT_SHIM_NAMESPACE_BEGIN  // the test puts the same text into a namespace of its own
#define PHXT_SHIM_NAMESPACE_BEGIN
#define PHXT_SHIM_NAMESPACE_END
struct AtenTensorOpaque;
struct StableListOpaque;
struct StringOpaque;
class TorchLibraryOpaque;
struct StreamOpaque;
#endif

PHXT_SHIM_NAMESPACE_BEGIN
extern "C" {

using AOTITorchError = int32_t;  // 0 is success
using AtenTensorHandle = AtenTensorOpaque *;
using StableListHandle = StableListOpaque *;
using StreamHandle = StreamOpaque *;  // of the later calls, in optional_shim.h
using StringHandle = StringOpaque *;
using TorchLibraryHandle = TorchLibraryOpaque *;
using StableIValue = uint64_t;  // an int by value, everything else as an owning handle

int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_device_type_cuda();
int32_t aoti_torch_layout_strided();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_bool();
int32_t aoti_torch_dtype_complex128();
int32_t aoti_torch_dtype_complex32();
int32_t aoti_torch_dtype_complex64();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_float64();
int32_t aoti_torch_dtype_int16();
int32_t aoti_torch_dtype_int32();
int32_t aoti_torch_dtype_int64();
int32_t aoti_torch_dtype_int8();
int32_t aoti_torch_dtype_uint16();
int32_t aoti_torch_dtype_uint32();
int32_t aoti_torch_dtype_uint64();
int32_t aoti_torch_dtype_uint8();
size_t aoti_torch_dtype_element_size(int32_t dtype);

bool aoti_torch_grad_mode_is_enabled();
void aoti_torch_grad_mode_set_enabled(bool enabled);

// Tensors. Pointers returned by get_sizes, get_strides and *_data_ptr are borrowed; new handles are owned.
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor);
AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle original, AtenTensorHandle *out);
AOTITorchError aoti_torch_empty_strided(int64_t ndim, const int64_t *sizes, const int64_t *strides, int32_t dtype,
                                        int32_t device_type, int32_t device_index, AtenTensorHandle *out);
// `deleter` gets `data` and `deleter_context` when the last tensor of this storage is gone.
AOTITorchError torch_from_blob(void *data, int64_t ndim, const int64_t *sizes, const int64_t *strides,
                               int64_t storage_offset, int32_t dtype, int32_t device_type, int32_t device_index,
                               AtenTensorHandle *out, int32_t layout, const uint8_t *opaque_metadata,
                               int64_t opaque_metadata_size, void (*deleter)(void *data, void *context),
                               void *deleter_context);
AOTITorchError aoti_torch_copy_(AtenTensorHandle self, AtenTensorHandle source, int32_t non_blocking);
AOTITorchError aoti_torch_get_device_index(AtenTensorHandle tensor, int32_t *out);
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t *out);
AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t *out);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t *out);
AOTITorchError aoti_torch_get_numel(AtenTensorHandle tensor, int64_t *out);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t **out);
AOTITorchError aoti_torch_get_storage_offset(AtenTensorHandle tensor, int64_t *out);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor, int64_t **out);
AOTITorchError aoti_torch_is_contiguous(AtenTensorHandle tensor, bool *out);
AOTITorchError torch_get_const_data_ptr(AtenTensorHandle tensor, const void **out);
AOTITorchError torch_get_mutable_data_ptr(AtenTensorHandle tensor, void **out);

// Products, past the dispatcher: no autograd.
AOTITorchError aoti_torch_cpu_mm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2);
AOTITorchError aoti_torch_cpu_bmm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2);
AOTITorchError aoti_torch_cpu_addmm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat1,
                                        AtenTensorHandle mat2, double beta, double alpha);

// Strings and lists, as they come on the stack of a kernel.
AOTITorchError torch_delete_string(StringHandle handle);
AOTITorchError torch_string_length(StringHandle handle, size_t *length);
AOTITorchError torch_string_c_str(StringHandle handle, const char **data);
AOTITorchError torch_delete_list(StableListHandle handle);
AOTITorchError torch_new_list_reserve_size(size_t size, StableListHandle *out);
AOTITorchError torch_list_push_back(StableListHandle handle, StableIValue element);
AOTITorchError torch_list_size(StableListHandle handle, size_t *size);
AOTITorchError torch_list_get_item(StableListHandle handle, size_t index, StableIValue *element);

// Registration, and calls of other ops. A kernel gets its arguments as owning values and replaces them by its results.
AOTITorchError aoti_torch_library_init_fragment(const char *ns, const char *file, uint32_t line,
                                                TorchLibraryHandle *out);
AOTITorchError aoti_torch_library_init_impl(const char *ns, const char *key, const char *file, uint32_t line,
                                            TorchLibraryHandle *out);
AOTITorchError aoti_torch_library_def(TorchLibraryHandle self, const char *schema);
AOTITorchError torch_library_impl(TorchLibraryHandle self, const char *name,
                                  void (*kernel)(StableIValue *, uint64_t, uint64_t), uint64_t extension_build_version);
AOTITorchError torch_call_dispatcher(const char *op_name, const char *overload_name, StableIValue *stack,
                                     uint64_t extension_build_version);

}  // extern "C"
PHXT_SHIM_NAMESPACE_END
