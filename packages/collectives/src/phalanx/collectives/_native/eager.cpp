// The short road of eager mode: an op on a plain CPU tensor, called without the dispatcher and without Python between.
// What it does is what _short_road.py does in Python; see there for when it is open.
//
//   start(op, type)   a callable(tensor, *arguments): starts the op, gives its result as a `type`; None: not plain
//   in_place(op)      a callable(tensor, *arguments): runs the op to its end, gives the tensor; None: not plain
//   wait(tensor)      waits for what is pending on a plain tensor
//
// Compiled by `phalanx build` for the torch and the Python that are installed, and loaded only by these.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace {

constexpr c10::DispatchKeySet kCpu(c10::DispatchKey::CPU);

// Never destroyed: torch may run Python while the process exits.
const c10::OperatorHandle &wait_op() {
  static const auto *const found =
      new c10::OperatorHandle(c10::Dispatcher::singleton().findSchemaOrThrow("phalanx::wait_tensor", ""));
  return *found;
}

// Whether the dispatcher would do nothing but call the kernel for the CPU.
bool is_plain(const at::Tensor &tensor) {
  static const c10::DispatchKeySet plain = at::empty({0}).key_set();
  return tensor.key_set() == plain && !(tensor.requires_grad() && c10::GradMode::is_enabled()) &&
         c10::impl::TorchDispatchModeTLS::stack_len() == 0 && !at::hasCallbacks();
}

// The argument as the schema wants it; nothing if it is of another kind, which torch may know how to convert.
std::optional<c10::IValue> converted(PyObject *value, c10::TypeKind kind) {
  if (kind == c10::TypeKind::StringType && PyUnicode_CheckExact(value)) {
    Py_ssize_t size = 0;
    const char *text = PyUnicode_AsUTF8AndSize(value, &size);
    if (text == nullptr) throw python_error();
    return std::string(text, static_cast<size_t>(size));
  }
  if (kind == c10::TypeKind::IntType && PyLong_CheckExact(value)) {
    const int64_t number = PyLong_AsLongLong(value);
    if (number == -1 && PyErr_Occurred() != nullptr) throw python_error();
    return number;
  }
  if (kind == c10::TypeKind::ListType && PyList_CheckExact(value)) {
    c10::List<int64_t> numbers;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i) {
      const auto each = converted(PyList_GET_ITEM(value, i), c10::TypeKind::IntType);
      if (!each) return std::nullopt;
      numbers.push_back(each->toInt());
    }
    return numbers;
  }
  return std::nullopt;
}

void call_kernel(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
  const pybind11::gil_scoped_release others_run;
  op.redispatchBoxed(kCpu, stack);
}

// What a callable is made of.
struct Road {
  PyObject_HEAD vectorcallfunc vectorcall;
  c10::OperatorHandle *op;
  std::vector<c10::TypeKind> *kinds;  // of its arguments
  PyTypeObject *type;                 // of the results of `start`; null: in_place

  // The arguments on a stack; false if the road is closed to them.
  bool open_to(PyObject *const *given, size_t count, torch::jit::Stack *stack) const {
    if (count != kinds->size() || !THPVariable_CheckExact(given[0]) || !is_plain(THPVariable_Unpack(given[0])))
      return false;
    stack->reserve(count);
    stack->emplace_back(THPVariable_Unpack(given[0]));
    for (size_t i = 1; i < count; ++i) {
      auto value = converted(given[i], (*kinds)[i]);
      if (!value) return false;
      stack->push_back(*std::move(value));
    }
    return true;
  }
};

PyObject *elem_name, *state_name;

// As _async_tensor.start.
PyObject *wrapped(PyTypeObject *type, const at::Tensor &elem) {
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

PyObject *road_call(PyObject *self, PyObject *const *given, size_t flags, PyObject *keywords) {
  HANDLE_TH_ERRORS
  const auto &road = *reinterpret_cast<const Road *>(self);
  const auto count = static_cast<size_t>(PyVectorcall_NARGS(flags));
  torch::jit::Stack stack;
  if (keywords != nullptr || !road.open_to(given, count, &stack)) Py_RETURN_NONE;
  const at::Tensor &tensor = THPVariable_Unpack(given[0]);
  call_kernel(*road.op, &stack);
  if (road.type != nullptr) return wrapped(road.type, stack.back().toTensor());
  tensor.unsafeGetTensorImpl()->bump_version();
  stack.assign(1, tensor);
  call_kernel(wait_op(), &stack);
  Py_INCREF(given[0]);
  return given[0];
  END_HANDLE_TH_ERRORS
}

void road_dealloc(PyObject *self) {
  auto *road = reinterpret_cast<Road *>(self);
  delete road->op;
  delete road->kinds;
  Py_XDECREF(road->type);
  PyObject_Free(self);
}

PyTypeObject road_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

PyObject *made_road(const char *name, PyTypeObject *type) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  auto *road = PyObject_New(Road, &road_type);
  if (road == nullptr) throw python_error();
  road->vectorcall = road_call;
  road->op = new c10::OperatorHandle(op);
  road->kinds = new std::vector<c10::TypeKind>;
  for (const c10::Argument &argument : op.schema().arguments()) road->kinds->push_back(argument.type()->kind());
  road->type = type;
  Py_XINCREF(type);
  return reinterpret_cast<PyObject *>(road);
}

PyObject *start(PyObject *, PyObject *given) {
  HANDLE_TH_ERRORS
  const char *name = nullptr;
  PyObject *type = nullptr;
  if (!PyArg_ParseTuple(given, "sO!", &name, &PyType_Type, &type)) return nullptr;
  return made_road(name, reinterpret_cast<PyTypeObject *>(type));
  END_HANDLE_TH_ERRORS
}

PyObject *in_place(PyObject *, PyObject *given) {
  HANDLE_TH_ERRORS
  const char *name = PyUnicode_AsUTF8(given);
  return name == nullptr ? nullptr : made_road(name, nullptr);
  END_HANDLE_TH_ERRORS
}

PyObject *wait(PyObject *, PyObject *tensor) {
  HANDLE_TH_ERRORS
  if (!THPVariable_CheckExact(tensor)) {
    PyErr_SetString(PyExc_TypeError, "wait takes a plain torch.Tensor");
    return nullptr;
  }
  torch::jit::Stack stack{THPVariable_Unpack(tensor)};
  call_kernel(wait_op(), &stack);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"start", start, METH_VARARGS, nullptr},
    {"in_place", in_place, METH_O, nullptr},
    {"wait", wait, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "phalanx_native", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_phalanx_native() {
  road_type.tp_name = "phalanx_native.Road";
  road_type.tp_basicsize = sizeof(Road);
  road_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
  road_type.tp_vectorcall_offset = offsetof(Road, vectorcall);
  road_type.tp_call = PyVectorcall_Call;
  road_type.tp_dealloc = road_dealloc;
  elem_name = PyUnicode_InternFromString("elem");
  state_name = PyUnicode_InternFromString("_state");
  if (elem_name == nullptr || state_name == nullptr || PyType_Ready(&road_type) != 0) return nullptr;
  return PyModule_Create(&definition);
}
