// The fast path of DTensors: calls of ops whose OpPlan only runs the op on the local tensors, without Python.
//
//   open(type, learn)   called once, with the class DTensor and the function that gives the recipe of a new call. From
//                       then on the ops of torch that reach the Python key come here first; returns their number
//   forget()            drops all recipes, and what boundary.cpp keeps
//   known()             the number of known calls, and the number of those that run here
//   use(bool)           sets whether calls run here, and returns whether they did before; true at first
//
// and the functions of boundary.cpp.
//
// This file has no rules. The first call of a kind runs as if this file did not exist; then learn(op, args, kwargs)
// says what was done: None (never run it here), or (arguments with other sizes, form, specs of the results). A recipe
// is found by op, specs, and all other arguments. With a mode, or with an argument that is neither a DTensor over a
// plain tensor nor a value, the call goes on to torch's own kernel for the Python key.
//
// _fastpath.py compiles this file for the installed torch and Python, and only these load it.
#include "dtensor.h"
// Python first, as it asks.
#include <structmember.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/tensor_memoryformats.h>
#include <torch/library.h>

#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace phalanx {
namespace {

using Stack = torch::jit::Stack;

PyObject *learn = nullptr;

// Where a member of __slots__ is in an object; -1 with an error set: it is none.
Py_ssize_t offset_of(PyTypeObject *type, const char *name) {
  auto found = py::reinterpret_steal<py::object>(PyObject_GetAttrString(reinterpret_cast<PyObject *>(type), name));
  if (!found) return -1;
  if (Py_TYPE(found.ptr()) != &PyMemberDescr_Type) {
    PyErr_Format(PyExc_TypeError, "%s of %s is not in __slots__", name, type->tp_name);
    return -1;
  }
  return reinterpret_cast<PyMemberDescrObject *>(found.ptr())->d_member->offset;
}

// ---- recipes --------------------------------------------------------------------------------------------------------

enum class Form { kAside, kSelf, kOne, kTuple, kList };

struct Recipe {
  Form form = Form::kAside;
  std::vector<std::pair<size_t, c10::IValue>> sizes;  // arguments that replace those of the call
  std::vector<Shape> results;
  std::vector<py::object> held;  // the specs in the key: while they live, their addresses are theirs
};

using Key = c10::SmallVector<uint64_t, 24>;

struct KeyHash {
  size_t operator()(const Key &key) const {
    uint64_t hash = 0x9e3779b97f4a7c15;
    for (uint64_t word : key) hash = (hash ^ word) * 0xff51afd7ed558ccd, hash ^= hash >> 32;
    return hash;
  }
};

struct Op {
  c10::SafeKernelFunction next;  // torch's kernel for the Python key
  std::unordered_map<Key, std::shared_ptr<const Recipe>, KeyHash> recipes;
};

// Never destroyed: Python ends before static objects are destroyed.
std::vector<Op *> &ops = *new std::vector<Op *>;
size_t count = 0;
constexpr size_t kMostKept = 16384;  // a program that passes other numbers all the time must not fill memory

void forget_all() {
  // The objects that the recipes hold are freed last: that may run Python, which may call an op.
  std::vector<decltype(Op::recipes)> old(ops.size());
  for (size_t i = 0; i < ops.size(); ++i) std::swap(old[i], ops[i]->recipes);
  count = 0;
}

// ---- the key of a call ----------------------------------------------------------------------------------------------

enum Tag : uint64_t { kNone = 1, kSpec, kInt, kDouble, kBool, kText, kDevice, kInts, kTensors };

uint64_t bits(double value) {
  uint64_t word;
  std::memcpy(&word, &value, sizeof word);
  return word;
}

bool add_tensor(Key &key, const at::Tensor &tensor, bool &any) {
  if (!tensor.defined()) return key.push_back(kNone), true;
  const c10::TensorImpl *body = tensor.unsafeGetTensorImpl();
  if (PyObject *object = object_of(body)) {
    any = true;
    key.push_back(kSpec);
    key.push_back(reinterpret_cast<uint64_t>(slot(object, spec_at)));
    return true;
  }
  // A number in an expression. Python sees it as one, too.
  if (!body->is_wrapped_number() || body->key_set().has(c10::DispatchKey::Python)) return false;
  if (tensor.scalar_type() == at::kDouble) {
    key.push_back(kDouble), key.push_back(bits(*static_cast<const double *>(body->data())));
  } else if (tensor.scalar_type() == at::kLong) {
    key.push_back(kInt), key.push_back(static_cast<uint64_t>(*static_cast<const int64_t *>(body->data())));
  } else {
    return false;
  }
  return true;
}

bool add_value(Key &key, const c10::IValue &value, bool &any) {
  if (value.isTensor()) return add_tensor(key, value.toTensor(), any);
  if (value.isNone()) return key.push_back(kNone), true;
  if (value.isInt()) return key.push_back(kInt), key.push_back(static_cast<uint64_t>(value.toInt())), true;
  if (value.isBool()) return key.push_back(kBool), key.push_back(value.toBool()), true;
  if (value.isDouble()) return key.push_back(kDouble), key.push_back(bits(value.toDouble())), true;
  if (value.isIntList()) {
    const auto list = value.toIntList();
    key.push_back(kInts), key.push_back(list.size());
    for (size_t i = 0; i < list.size(); ++i) key.push_back(static_cast<uint64_t>(list.get(i)));
    return true;
  }
  if (value.isTensorList()) {
    const auto list = value.toTensorList();
    key.push_back(kTensors), key.push_back(list.size());
    for (size_t i = 0; i < list.size(); ++i)
      if (!add_tensor(key, list.get(i), any)) return false;
    return true;
  }
  if (value.isString()) {
    const std::string &text = value.toStringRef();
    key.push_back(kText), key.push_back(text.size());
    for (char one : text) key.push_back(static_cast<unsigned char>(one));
    return true;
  }
  if (value.isDevice()) {
    const c10::Device device = value.toDevice();
    key.push_back(kDevice), key.push_back(static_cast<uint64_t>(device.type()));
    key.push_back(static_cast<uint64_t>(device.index()));
    return true;
  }
  return false;  // a generator, a SymInt, a list of another kind
}

// ---- running one ----------------------------------------------------------------------------------------------------

at::Tensor local_of(const at::Tensor &tensor) {
  if (!tensor.defined() || !tensor.key_set().has(c10::DispatchKey::Python)) return tensor;
  return THPVariable_Unpack(slot(tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj(), local_at));
}

// The keys above Python: autograd and the others have run for the DTensor already.
const c10::DispatchKeySet above_python =
    c10::DispatchKeySet(c10::DispatchKeySet::FULL) ^
    (c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Python) |
     c10::DispatchKeySet(c10::DispatchKey::Python));

// Whether a DTensor may be written into without a look by Python: it is no view, which may be a copy.
bool is_writable(const c10::IValue &value) {
  static PyObject *mark = PyUnicode_InternFromString("_is_view_of_copy");
  const at::Tensor &tensor = value.toTensor();
  PyObject *object = tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
  return !tensor.is_view() && PyObject_HasAttr(object, mark) == 0;
}

// Below this the GIL is kept: to release it and take it again would cost more than other threads gain.
constexpr int64_t kLittle = 4096;  // elements of all inputs together

int64_t work_of(const at::Tensor &local) { return !local.defined() ? 0 : local.is_cpu() ? local.numel() : kLittle + 1; }

void run(const c10::OperatorHandle &op, const Recipe &recipe, Stack *stack, PyThreadState *&saved) {
  const size_t arguments = op.schema().arguments().size();
  const size_t first = stack->size() - arguments;
  int64_t work = 0;
  at::Tensor self;
  if (recipe.form == Form::kSelf) self = (*stack)[first].toTensor();
  for (size_t i = first; i < stack->size(); ++i) {
    c10::IValue &value = (*stack)[i];
    if (value.isTensor()) {
      value = local_of(value.toTensor());
      work += work_of(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> locals;
      const auto list = value.toTensorList();
      for (size_t one = 0; one < list.size(); ++one) locals.push_back(local_of(list.get(one)));
      value = std::move(locals);
      work = kLittle + 1;
    }
  }
  for (const auto &[argument, value] : recipe.sizes) (*stack)[first + argument] = value;
  if (work > kLittle) saved = PyEval_SaveThread();
  {
    c10::impl::ExcludeDispatchKeyGuard guard(above_python);
    static const auto view = c10::Dispatcher::singleton().findSchemaOrThrow("aten::view", "");
    if (op == view && !(*stack)[first].toTensor().is_contiguous()) {  // as `viewed` in _op_plan.py
      at::Tensor seen = (*stack)[first].toTensor().reshape((*stack)[first + 1].toIntVector());
      torch::jit::drop(*stack, arguments);
      stack->emplace_back(std::move(seen));
    } else {
      op.callBoxed(stack);
    }
  }
  if (saved != nullptr) PyEval_RestoreThread(std::exchange(saved, nullptr));
  const auto made = [&](const at::Tensor &local, const Shape &shape) {
    return shape.spec ? wrapped(local, shape) : at::Tensor();
  };
  if (recipe.form == Form::kSelf) {
    (*stack)[first] = std::move(self);
  } else if (recipe.form == Form::kList) {
    const auto locals = (*stack)[first].toTensorList();
    TORCH_CHECK(locals.size() == recipe.results.size(), op.schema().name(), ": ", locals.size(), " local results");
    c10::List<at::Tensor> whole;
    for (size_t i = 0; i < locals.size(); ++i) whole.push_back(made(locals.get(i), recipe.results[i]));
    (*stack)[first] = std::move(whole);
  } else {
    for (size_t i = 0; i < recipe.results.size(); ++i)
      (*stack)[first + i] = made((*stack)[first + i].toTensor(), recipe.results[i]);
  }
}

// ---- learning one ---------------------------------------------------------------------------------------------------

py::object python_of(const c10::IValue &value, const c10::Argument &argument) {
  if (value.isInt()) {
    auto type = argument.real_type();
    if (type->kind() == c10::TypeKind::OptionalType) type = type->expectRef<c10::OptionalType>().getElementType();
    PyObject *found = nullptr;
    if (type->kind() == c10::TypeKind::ScalarTypeType)
      found = reinterpret_cast<PyObject *>(torch::getTHPDtype(static_cast<c10::ScalarType>(value.toInt())));
    if (type->kind() == c10::TypeKind::LayoutType)
      found = reinterpret_cast<PyObject *>(torch::getTHPLayout(static_cast<c10::Layout>(value.toInt())));
    if (type->kind() == c10::TypeKind::MemoryFormatType)
      found = torch::utils::getTHPMemoryFormat(static_cast<c10::MemoryFormat>(value.toInt()));
    if (found != nullptr) return py::reinterpret_borrow<py::object>(found);
  }
  return torch::jit::toPyObject(value);
}

bool is_default(const c10::IValue &value, const c10::Argument &argument) {
  return argument.default_value().has_value() && *argument.default_value() == value;
}

// Ask Python what it did with these arguments: as torch gives them to __torch_dispatch__, defaults left out.
py::object asked(const c10::OperatorHandle &op, const std::vector<c10::IValue> &given) {
  const auto &arguments = op.schema().arguments();
  size_t positional = 0;
  for (size_t i = 0; i < arguments.size() && !arguments[i].kwarg_only(); ++i)
    if (!is_default(given[i], arguments[i])) positional = i + 1;
  py::tuple args(positional);
  for (size_t i = 0; i < positional; ++i) args[i] = python_of(given[i], arguments[i]);
  py::dict kwargs;
  for (size_t i = 0; i < arguments.size(); ++i)
    if (arguments[i].kwarg_only() && !is_default(given[i], arguments[i]))
      kwargs[arguments[i].name().c_str()] = python_of(given[i], arguments[i]);
  return py::reinterpret_borrow<py::object>(learn)(py::handle(torch::detail::getTorchApiFunction(op)), args, kwargs);
}

std::shared_ptr<Recipe> read_recipe(const py::object &said) {
  auto made = std::make_shared<Recipe>();
  if (said.is_none()) return made;
  const auto parts = said.cast<py::tuple>();
  for (py::handle pair : parts[0]) {
    const auto entry = pair.cast<py::tuple>();
    if (PyLong_CheckExact(py::object(entry[1]).ptr()))
      made->sizes.emplace_back(entry[0].cast<size_t>(), entry[1].cast<int64_t>());
    else
      made->sizes.emplace_back(entry[0].cast<size_t>(), entry[1].cast<std::vector<int64_t>>());
  }
  for (py::handle spec : parts[2]) {
    auto shape = shape_of(spec);
    if (!shape) return made;
    made->results.push_back(std::move(*shape));
  }
  const auto form = parts[1].cast<std::string>();
  made->form = form == "self"    ? Form::kSelf
               : form == "list"  ? Form::kList
               : form == "tuple" ? Form::kTuple
                                 : Form::kOne;
  return made;
}

// ---- the kernel -----------------------------------------------------------------------------------------------------

bool key_of(Key &key, const c10::OperatorHandle &op, const Stack *stack) {
  bool any = false;
  const size_t arguments = op.schema().arguments().size();
  for (size_t i = stack->size() - arguments; i < stack->size(); ++i)
    if (!add_value(key, (*stack)[i], any)) return false;
  return any;
}

void learn_one(Op &self, const c10::OperatorHandle &op, const Key &before, const std::vector<c10::IValue> &given) {
  Key after;
  // An op that changes what its arguments are is none for recipes.
  if (!key_of(after, op, &given) || after != before) return;
  auto recipe = read_recipe(asked(op, given));
  for (size_t i = 0; i < given.size(); ++i) {
    const auto hold = [&](const at::Tensor &tensor) {
      PyObject *object = tensor.defined() ? object_of(tensor.unsafeGetTensorImpl()) : nullptr;
      if (object != nullptr) recipe->held.push_back(py::reinterpret_borrow<py::object>(slot(object, spec_at)));
    };
    if (given[i].isTensor()) hold(given[i].toTensor());
    if (given[i].isTensorList())
      for (const at::Tensor &one : given[i].toTensorVector()) hold(one);
  }
  if (count >= kMostKept) forget_all();
  count += self.recipes.insert_or_assign(before, std::move(recipe)).second;
}

struct Kernel final : c10::OperatorKernel {
  Op *self;
  explicit Kernel(Op *op) : self(op) {}

  void operator()(const c10::OperatorHandle &op, c10::DispatchKeySet keys, Stack *stack) {
    if (c10::impl::TorchDispatchModeTLS::stack_len() != 0 || !in_use.load(std::memory_order_relaxed))
      return self->next.callBoxed(op, keys, stack);
    Key key;
    {
      Gil gil;
      std::shared_ptr<const Recipe> recipe;
      if (!key_of(key, op, stack)) {
        key.clear();
      } else if (const auto found = self->recipes.find(key); found != self->recipes.end()) {
        recipe = found->second;
        const bool ours =
            recipe->form != Form::kAside &&
            (recipe->form != Form::kSelf || is_writable((*stack)[stack->size() - op.schema().arguments().size()]));
        if (ours) return run(op, *recipe, stack, gil.saved);
        key.clear();
      }
    }
    if (key.empty()) return self->next.callBoxed(op, keys, stack);
    std::vector<c10::IValue> given(stack->end() - static_cast<ptrdiff_t>(op.schema().arguments().size()), stack->end());
    self->next.callBoxed(op, keys, stack);
    Gil gil;
    try {
      learn_one(*self, op, key, given);
    } catch (py::error_already_set &error) {
      error.discard_as_unraisable("phalanx.dtensor._fastpath");
    } catch (const std::exception &) {
      // An argument that Python cannot be shown. The call is done; the next of its kind need not be looked at.
      self->recipes.insert_or_assign(key, std::make_shared<Recipe>());
    }
    given.clear();
  }
};

// ---- the module -----------------------------------------------------------------------------------------------------

bool is_tensor(const c10::TypePtr &type) {
  return type->isSubtypeOf(*c10::TensorType::get()) || type->isSubtypeOf(*c10::ListType::ofTensors());
}

// Whether an OpPlan may run the op as it is: it takes and returns tensors, and writes no memory but that of its first
// argument. Composite ops reach the Python key as the ops of which they are made.
bool is_for_us(const c10::OperatorHandle &op) {
  if (!op.hasSchema() || op.schema().returns().empty() || op.schema().arguments().empty()) return false;
  if (op.operator_name().name.rfind("aten::", 0) != 0) return false;
  if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) return false;
  if (op.hasKernelForDispatchKey(c10::DispatchKey::Python)) return false;
  for (const c10::Argument &one : op.schema().returns())
    if (!is_tensor(one.type())) return false;
  bool any = false;
  for (const c10::Argument &one : op.schema().arguments()) {
    any |= is_tensor(one.type());
    if (one.kwarg_only() && is_tensor(one.type())) return false;
  }
  return any;
}

PyObject *open(PyObject *, PyObject *given) {
  HANDLE_TH_ERRORS
  PyObject *type = nullptr, *ask = nullptr;
  if (!PyArg_ParseTuple(given, "O!O", &PyType_Type, &type, &ask)) return nullptr;
  auto *made = reinterpret_cast<PyTypeObject *>(type);
  if ((local_at = offset_of(made, "_local_tensor")) < 0 || (spec_at = offset_of(made, "_spec")) < 0) return nullptr;
  TORCH_CHECK(dtensor == nullptr, "phalanx_dtensor_native: open was called before");
  Py_INCREF(type), Py_INCREF(ask);
  dtensor = made, learn = ask;
  // Now, and not when an op is first met: another thread may be calling it then.
  auto *library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::Python, __FILE__, __LINE__);
  auto &dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName &name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op || !is_for_us(*op)) continue;
    ops.push_back(new Op{op->getComputedKernelForDispatchKey(c10::DispatchKey::Python), {}});
    const std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(ops.back())));
  }
  return PyLong_FromSize_t(ops.size());
  END_HANDLE_TH_ERRORS
}

PyObject *forget(PyObject *, PyObject *) {
  forget_all();
  forget_gradients();
  Py_RETURN_NONE;
}

PyObject *known(PyObject *, PyObject *) {
  size_t here = 0;
  for (const Op *op : ops)
    for (const auto &entry : op->recipes) here += entry.second->form != Form::kAside;
  return Py_BuildValue("nn", static_cast<Py_ssize_t>(count), static_cast<Py_ssize_t>(here));
}

PyObject *use(PyObject *, PyObject *given) {
  const int truth = PyObject_IsTrue(given);
  if (truth < 0) return nullptr;
  return PyBool_FromLong(in_use.exchange(truth != 0));
}

PyMethodDef methods[] = {
    {"open", open, METH_VARARGS, nullptr},
    {"forget", forget, METH_NOARGS, nullptr},
    {"known", known, METH_NOARGS, nullptr},
    {"use", use, METH_O, nullptr},
    {"record", record, METH_VARARGS, nullptr},
    {"from_local", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(from_local)), METH_FASTCALL, nullptr},
    {"to_local", to_local, METH_O, nullptr},
    {"is_recorded", is_recorded, METH_O, nullptr},
    {"redistributed", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(redistributed)), METH_FASTCALL,
     nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "phalanx_dtensor_native", nullptr, -1, methods};

}  // namespace
}  // namespace phalanx

PyMODINIT_FUNC PyInit_phalanx_dtensor_native() { return PyModule_Create(&phalanx::definition); }
