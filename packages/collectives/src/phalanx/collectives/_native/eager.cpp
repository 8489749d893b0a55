// The fast path of eager mode: it calls the kernel of an op on a plain CPU tensor without the dispatcher and without
// Python. It does what _fast_path.py does in Python, which also says which calls can take it.
//
//   connect(...)            must be called first: the addresses of functions of libphalanx_torch.so
//   start(op, type)         a callable(tensor, *arguments) that starts the op and returns its result as a `type`, or
//                           None if the call cannot take the fast path
//   in_place(op)            a callable(tensor, *arguments) that runs the op to its end and returns the tensor, or None
//   wait(tensor)            waits for the collectives that still write into a plain tensor, those of torch included
//   needs_gradient(tensor)  whether a result computed from the tensor now gets a gradient
//
// Kernels are called through torch's stable ABI, in which an argument is a number or an owning handle.
//
// `phalanx build` compiles this file for the installed torch and Python, and only these load it.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>

#include <array>
#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>

#include "core_api.h"

phalanx_native::Library phalanx_native::library;

// Raises ValueError for a wrong argument, the exception of a signal handler that ran during the wait, or RuntimeError.
void phalanx_native::raise_on(int32_t status) {
  constexpr int32_t kInvalid = -1;  // PHX_ERR_INVALID
  if (status >= 0) return;
  void *type = nullptr, *exception = nullptr;
  if (library.take_interrupted(&type, &exception) != 0) {
    const pybind11::gil_scoped_acquire held;
    PyErr_SetObject(static_cast<PyObject *>(type), static_cast<PyObject *>(exception));
    throw pybind11::error_already_set();
  }
  if (status == kInvalid) throw std::invalid_argument(library.last_error());
  throw std::runtime_error(library.last_error());
}

namespace {

using phalanx_native::Kernel;
using phalanx_native::library;

bool needs_gradient(const at::Tensor &tensor) { return tensor.requires_grad() && c10::GradMode::is_enabled(); }

// Whether the dispatcher would do nothing but call the kernel for the CPU.
bool is_plain(const at::Tensor &tensor) {
  static const c10::DispatchKeySet plain = at::empty({0}).key_set();
  return tensor.key_set() == plain && !needs_gradient(tensor) && c10::impl::TorchDispatchModeTLS::stack_len() == 0 &&
         !at::hasCallbacks();
}

bool is_text(PyObject *value) {
  if (!PyUnicode_CheckExact(value)) return false;
  if (PyUnicode_AsUTF8(value) != nullptr) return true;
  PyErr_Clear();
  return false;
}

bool is_number(PyObject *value) {
  if (!PyLong_CheckExact(value)) return false;
  int overflow = 0;
  PyLong_AsLongLongAndOverflow(value, &overflow);
  return overflow == 0;
}

// Whether the argument has the type that the schema names. Torch may convert other arguments, or refuse them.
bool fits(PyObject *value, c10::TypeKind kind) {
  if (kind == c10::TypeKind::StringType) return is_text(value);
  if (kind == c10::TypeKind::IntType) return is_number(value);
  if (kind != c10::TypeKind::ListType || !PyList_CheckExact(value)) return false;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i)
    if (!is_number(PyList_GET_ITEM(value, i))) return false;
  return true;
}

void check(AOTITorchError error) { TORCH_CHECK(error == 0, "phalanx: an argument cannot be handed to a kernel"); }

StableIValue number(PyObject *value) { return static_cast<StableIValue>(PyLong_AsLongLong(value)); }

// An argument for a kernel, which owns its arguments. `fits` has accepted the value.
StableIValue owned_argument(const at::Tensor &tensor) {
  return reinterpret_cast<StableIValue>(torch::aot_inductor::new_tensor_handle(at::Tensor(tensor)));
}

StableIValue owned_argument(PyObject *value, c10::TypeKind kind) {
  if (kind == c10::TypeKind::IntType) return number(value);
  if (kind == c10::TypeKind::StringType) {
    StringHandle text = nullptr;
    Py_ssize_t size = 0;
    const char *data = PyUnicode_AsUTF8AndSize(value, &size);
    check(torch_new_string_handle(data, static_cast<size_t>(size), &text));
    return reinterpret_cast<StableIValue>(text);
  }
  StableListHandle list = nullptr;
  const Py_ssize_t size = PyList_GET_SIZE(value);
  check(torch_new_list_reserve_size(static_cast<size_t>(size), &list));
  for (Py_ssize_t i = 0; i < size; ++i) check(torch_list_push_back(list, number(PyList_GET_ITEM(value, i))));
  return reinterpret_cast<StableIValue>(list);
}

// Takes over the result of a kernel.
at::Tensor tensor_of_result(StableIValue result) {
  const std::unique_ptr<at::Tensor> tensor(
      torch::aot_inductor::tensor_handle_to_tensor_pointer(reinterpret_cast<AtenTensorHandle>(result)));
  return std::move(*tensor);
}

// A second reference to a tensor, besides that of Python, while the GIL is released: if the last reference ended then,
// torch would take the GIL to free the tensor.
at::Tensor retained(PyObject *tensor) { return THPVariable_Unpack(tensor); }

void wait_for(const at::Tensor &tensor) {
  static const Kernel wait = library.kernel_of("wait_tensor_");
  StableIValue argument = owned_argument(tensor);
  const pybind11::gil_scoped_release released;
  phalanx_native::raise_on(wait(&argument, 1, 0));
}

constexpr size_t kMaxArguments = 8;

// A call of one op. What `start` and `in_place` return is a function that has it in a capsule.
struct FastCall {
  Kernel kernel;
  pybind11::object type;  // class of the results of `start`; null for `in_place`
  size_t count;           // number of arguments; the first is a tensor
  std::array<c10::TypeKind, kMaxArguments> kinds;

  bool accepts(PyObject *const *given, size_t given_count) const {
    if (given_count != count || !THPVariable_CheckExact(given[0]) || !is_plain(THPVariable_Unpack(given[0])))
      return false;
    for (size_t i = 1; i < count; ++i)
      if (!fits(given[i], kinds[i])) return false;
    return true;
  }

  // Calls the kernel, and returns its result if it has one.
  StableIValue call(PyObject *const *given) const {
    std::array<StableIValue, kMaxArguments> stack;
    stack[0] = owned_argument(THPVariable_Unpack(given[0]));
    for (size_t i = 1; i < count; ++i) stack[i] = owned_argument(given[i], kinds[i]);
    const pybind11::gil_scoped_release released;
    phalanx_native::raise_on(kernel(stack.data(), count, type ? 1 : 0));
    return stack[0];
  }
};

// Does the same as _async_tensor.start.
PyObject *wrapped(PyTypeObject *type, const at::Tensor &elem) {
  static PyObject *const elem_name = PyUnicode_InternFromString("elem");
  static PyObject *const state_name = PyUnicode_InternFromString("_state");
  const at::Tensor shell = at::for_blob(nullptr, elem.sizes())
                               .context(nullptr, [](void *) {})
                               .target_device(elem.device())
                               .options(at::TensorOptions().dtype(elem.dtype()))
                               .allocator(c10::GetAllocator(c10::kMeta))
                               .resizeable_storage()
                               .make_tensor();
  shell.unsafeGetTensorImpl()->set_python_dispatch(true);
  auto made = pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(shell, type));
  auto inner = pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(elem));
  if (!made || !inner || PyObject_SetAttr(made.ptr(), elem_name, inner.ptr()) != 0 ||
      PyObject_SetAttr(made.ptr(), state_name, Py_None) != 0)
    throw python_error();
  return made.release().ptr();
}

PyObject *call_fast(PyObject *capsule, PyObject *const *given, Py_ssize_t count, PyObject *keywords) {
  HANDLE_TH_ERRORS
  const auto &call = *static_cast<const FastCall *>(PyCapsule_GetPointer(capsule, nullptr));
  if (keywords != nullptr || !call.accepts(given, static_cast<size_t>(count))) Py_RETURN_NONE;
  const at::Tensor tensor = retained(given[0]);
  const StableIValue result = call.call(given);
  if (call.type) return wrapped(reinterpret_cast<PyTypeObject *>(call.type.ptr()), tensor_of_result(result));
  tensor.unsafeGetTensorImpl()->bump_version();
  wait_for(tensor);
  Py_INCREF(given[0]);
  return given[0];
  END_HANDLE_TH_ERRORS
}

PyObject *make_fast_call(const char *name, PyObject *type) {
  static PyMethodDef definition = {"fast_call", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_fast)),
                                   METH_FASTCALL | METH_KEYWORDS, nullptr};
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow((std::string("phalanx::") + name).c_str(), "");
  const auto &arguments = op.schema().arguments();
  FastCall call{library.kernel_of(name), pybind11::reinterpret_borrow<pybind11::object>(type), arguments.size(), {}};
  TORCH_CHECK(call.kernel != nullptr && call.count <= kMaxArguments, "phalanx: no fast path for ", name);
  for (size_t i = 0; i < call.count; ++i) call.kinds[i] = arguments[i].type()->kind();
  const pybind11::capsule self(new FastCall(std::move(call)), [](void *held) { delete static_cast<FastCall *>(held); });
  return PyCFunction_New(&definition, self.ptr());
}

PyObject *connect(PyObject *, PyObject *given) {
  unsigned long long kernel_of = 0, last_error = 0, all_reduce = 0, take_interrupted = 0;
  if (!PyArg_ParseTuple(given, "KKKK", &kernel_of, &last_error, &all_reduce, &take_interrupted)) return nullptr;
  library.kernel_of = reinterpret_cast<decltype(library.kernel_of)>(kernel_of);
  library.last_error = reinterpret_cast<decltype(library.last_error)>(last_error);
  library.all_reduce = reinterpret_cast<decltype(library.all_reduce)>(all_reduce);
  library.take_interrupted = reinterpret_cast<decltype(library.take_interrupted)>(take_interrupted);
  Py_RETURN_NONE;
}

PyObject *start(PyObject *, PyObject *given) {
  HANDLE_TH_ERRORS
  const char *name = nullptr;
  PyObject *type = nullptr;
  if (!PyArg_ParseTuple(given, "sO!", &name, &PyType_Type, &type)) return nullptr;
  return make_fast_call(name, type);
  END_HANDLE_TH_ERRORS
}

PyObject *in_place(PyObject *, PyObject *given) {
  HANDLE_TH_ERRORS
  const char *name = PyUnicode_AsUTF8(given);
  return name == nullptr ? nullptr : make_fast_call(name, nullptr);
  END_HANDLE_TH_ERRORS
}

PyObject *wait(PyObject *, PyObject *tensor) {
  HANDLE_TH_ERRORS
  if (!THPVariable_CheckExact(tensor)) {
    PyErr_SetString(PyExc_TypeError, "wait takes a plain torch.Tensor");
    return nullptr;
  }
  wait_for(retained(tensor));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject *needs_gradient(PyObject *, PyObject *tensor) {
  if (!PyObject_TypeCheck(tensor, reinterpret_cast<PyTypeObject *>(THPVariableClass))) {
    PyErr_SetString(PyExc_TypeError, "needs_gradient takes a torch.Tensor");
    return nullptr;
  }
  return PyBool_FromLong(needs_gradient(THPVariable_Unpack(tensor)));
}

PyMethodDef methods[] = {
    {"connect", connect, METH_VARARGS, nullptr},
    {"start", start, METH_VARARGS, nullptr},
    {"in_place", in_place, METH_O, nullptr},
    {"wait", wait, METH_O, nullptr},
    {"needs_gradient", needs_gradient, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "phalanx_native", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_phalanx_native() { return PyModule_Create(&definition); }
