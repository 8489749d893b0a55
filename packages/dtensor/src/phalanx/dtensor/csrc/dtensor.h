// The class DTensor as C++ sees it: its slots, how one is made, and the GIL. For the files of this folder.
#pragma once

#include <torch/csrc/python_headers.h>
// Python first, as it asks.
#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <optional>
#include <utility>

namespace phalanx {

inline PyTypeObject *dtensor = nullptr;
inline Py_ssize_t local_at = 0, spec_at = 0;  // where its slots are
inline std::atomic<bool> in_use = true;

inline PyObject *&slot(PyObject *object, Py_ssize_t at) {
  return *reinterpret_cast<PyObject **>(reinterpret_cast<char *>(object) + at);
}

// The object of a DTensor over a plain tensor; null: it is something else. Holds the GIL.
inline PyObject *object_of(const c10::TensorImpl *tensor) {
  PyObject *object = tensor->pyobj_slot()->load_pyobj();
  if (object == nullptr || Py_TYPE(object) != dtensor) return nullptr;
  PyObject *local = slot(object, local_at), *spec = slot(object, spec_at);
  if (local == nullptr || spec == nullptr || !THPVariable_CheckExact(local)) return nullptr;
  return THPVariable_Unpack(local).key_set().has(c10::DispatchKey::Python) ? nullptr : object;
}

// The shape of a DTensor, as tensors of C++ need it.
struct Shape {
  c10::SmallVector<int64_t, 5> sizes, strides;
  py::object spec;  // a DTensorSpec; empty: there is no tensor
};

inline bool read_ints(PyObject *tuple, c10::SmallVector<int64_t, 5> &into) {
  if (!PyTuple_Check(tuple)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
    PyObject *one = PyTuple_GET_ITEM(tuple, i);
    if (!PyLong_CheckExact(one)) return false;
    into.push_back(PyLong_AsLongLong(one));
  }
  return true;
}

// The shape of a DTensorSpec, empty for None; nullopt if its sizes are symbolic.
inline std::optional<Shape> shape_of(py::handle spec) {
  Shape made;
  if (spec.is_none()) return made;
  made.spec = py::reinterpret_borrow<py::object>(spec);
  if (!read_ints(py::object(spec.attr("shape")).ptr(), made.sizes)) return std::nullopt;
  if (!read_ints(py::object(spec.attr("stride")).ptr(), made.strides)) return std::nullopt;
  return made;
}

// A DTensor without data of its own, as torch.Tensor._dtensor__new__ makes one. Holds the GIL.
inline at::Tensor wrapped(const at::Tensor &local, const Shape &shape) {
  const auto offset = static_cast<size_t>(local.storage_offset());
  const size_t bytes = at::detail::computeStorageNbytes(shape.sizes, shape.strides, local.dtype().itemsize(), offset);
  c10::Storage storage(c10::Storage::use_byte_size_t{}, bytes, at::DataPtr{nullptr, local.device()},
                       c10::GetAllocator(c10::kMeta), /*resizable=*/true);
  c10::DispatchKeySet keys{local.options().computeDispatchKey()};
  for (auto key : {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative})
    if (local.key_set().has(key)) keys = keys.add(key);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, local.dtype());
  c10::TensorImpl *body = made.unsafeGetTensorImpl();
  body->set_sizes_and_strides(c10::IntArrayRef(shape.sizes), c10::IntArrayRef(shape.strides), local.storage_offset());
  body->set_python_dispatch(true);
  auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(made, dtensor));
  auto inner = py::reinterpret_steal<py::object>(THPVariable_Wrap(local));
  if (!object || !inner) throw python_error();
  slot(object.ptr(), local_at) = inner.release().ptr();
  slot(object.ptr(), spec_at) = py::object(shape.spec).release().ptr();
  return made;
}

// Holds the GIL, which the owner may release while an op runs.
struct Gil {
  PyGILState_STATE state = PyGILState_Ensure();
  PyThreadState *saved = nullptr;
  ~Gil() {
    if (saved != nullptr) PyEval_RestoreThread(saved);
    PyGILState_Release(state);
  }
};

// ---- boundary.cpp: functions of the module --------------------------------------------------------------------------

PyObject *record(PyObject *, PyObject *given);
PyObject *from_local(PyObject *, PyObject *const *given, Py_ssize_t count);
PyObject *to_local(PyObject *, PyObject *tensor);
PyObject *is_recorded(PyObject *, PyObject *tensor);
PyObject *redistributed(PyObject *, PyObject *const *given, Py_ssize_t count);
void forget_gradients();

}  // namespace phalanx
