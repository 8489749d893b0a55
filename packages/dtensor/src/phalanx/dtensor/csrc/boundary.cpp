// The autograd nodes between plain tensors and DTensors, as in _autograd.py, without Python where there is nothing to
// decide: the gradient has the right placements, and no gradient of it is wanted. All other cases go to Python.
//
//   record(gradient, from_local, to_local, redistribute)   once: what gives the Spec of a gradient for that of a
//                         tensor, and the backward of each function: (spec, gradient) to the gradient of the input
//   from_local(local, spec)       a DTensor of a plain tensor that requires gradients, or None: not for us
//   to_local(tensor)              its local tensor, or None
//   is_recorded(tensor)           whether redistributed takes this DTensor
//   redistributed(tensor, made)   `made`, a DTensor without history, as the result of redistribute(tensor)
#include "dtensor.h"
// Python first, as it asks.
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <array>
#include <memory>
#include <string>
#include <type_traits>
#include <unordered_map>

namespace phalanx {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

PyObject *gradient_of = nullptr;
enum Function : size_t { kFromLocal, kToLocal, kRedistribute, kFunctions };
std::array<PyObject *, kFunctions> backwards{};

// ---- specs and those of their gradients -----------------------------------------------------------------------------

struct Known {
  Shape shape, gradient;
  std::string number;  // its own, forever
};
using KnownPtr = std::shared_ptr<const Known>;

// Never destroyed: Python ends before static objects are destroyed.
auto &known_specs = *new std::unordered_map<PyObject *, KnownPtr>;
constexpr size_t kMostSpecs = 4096;

// Nodes are freed by threads of autograd, too, and at exit.
void free_known(const Known *one) {
  if (!Py_IsInitialized()) return;
  Gil gil;
  delete one;
}

// Null: its sizes are symbolic.
KnownPtr know(PyObject *spec) {
  if (const auto found = known_specs.find(spec); found != known_specs.end()) return found->second;
  auto shape = shape_of(spec);
  if (!shape) return nullptr;
  auto gradient = shape_of(py::reinterpret_borrow<py::object>(gradient_of)(py::handle(spec)));
  if (!gradient) return nullptr;
  static uint64_t made_so_far = 0;
  KnownPtr made(new Known{std::move(*shape), std::move(*gradient), std::to_string(++made_so_far)}, free_known);
  if (known_specs.size() >= kMostSpecs) forget_gradients();
  return known_specs.emplace(spec, made).first->second;  // it holds the spec, so the address stays its own
}

// ---- whether it is for us -------------------------------------------------------------------------------------------

// No mode and no transform of functorch: they see what Python does.
bool is_plain_call() {
  return in_use.load(std::memory_order_relaxed) && c10::impl::TorchDispatchModeTLS::stack_len() == 0 &&
         !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

bool is_plain(const at::Tensor &tensor) { return !tensor.key_set().has(c10::DispatchKey::Python); }

// Recorded for backward, and for nothing else.
bool wants_history(const at::Tensor &tensor) {
  return at::GradMode::is_enabled() && tensor.requires_grad() && !torch::autograd::isFwGradDefined(tensor);
}

// What is known of the spec of a DTensor that is recorded for backward; null: the call is not for us.
KnownPtr know_recorded(PyObject *tensor) {
  if (Py_TYPE(tensor) != dtensor || !is_plain_call()) return nullptr;
  const at::Tensor &whole = THPVariable_Unpack(tensor);
  const bool is_ours = object_of(whole.unsafeGetTensorImpl()) != nullptr && wants_history(whole);
  return is_ours ? know(slot(tensor, spec_at)) : nullptr;
}

// ---- the nodes ------------------------------------------------------------------------------------------------------

template <Function kWhich>
struct Backward final : Node {
  KnownPtr known;  // the spec of the DTensor: the result of from_local, the input of the others

  std::string name() const override {
    return kWhich == kFromLocal ? "FromLocalBackward" : kWhich == kToLocal ? "ToLocalBackward" : "RedistributeBackward";
  }

  variable_list apply(variable_list &&grads) override { return {passed(*known, grads[0])}; }

  // For compiled autograd: a graph is of this function and this spec, and calls it.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs &args) const override { args.collect(known->number); }

  variable_list apply_with_saved(const variable_list &grads,
                                 torch::dynamo::autograd::SwapSavedVariables &saved) override {
    namespace compiled = torch::dynamo::autograd;
    const auto &interface = compiled::getPyCompilerInterface();
    const auto run = [known = known](const variable_list &given, const std::vector<c10::IValue> &) {
      return variable_list{passed(*known, given[0])};
    };
    const std::string called = interface->bind_function(saved.get_py_compiler(), "phalanx::" + name(), run, {},
                                                        /*is_custom_function=*/true, /*is_traceable=*/false);
    const auto shapes = compiled::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
        compiled::get_input_metadata(next_edges()));
    return interface->call_function(saved.get_py_compiler(), "apply_functional", called, grads, {}, shapes);
  }

 private:
  static at::Tensor passed(const Known &known, const at::Tensor &grad) {
    if (!grad.defined()) return {};
    Gil gil;
    if (is_plain_call() && !(at::GradMode::is_enabled() && grad.requires_grad())) {
      if (kWhich == kToLocal) {
        if (is_plain(grad) && grad.dtype() == dtype_of(known)) return wrapped(grad, known.gradient);
      } else if (PyObject *object = object_of(grad.unsafeGetTensorImpl());
                 object != nullptr && slot(object, spec_at) == known.gradient.spec.ptr()) {
        if (kWhich == kRedistribute) return grad;
        return THPVariable_Unpack(slot(object, local_at));
      }
    }
    auto given = py::reinterpret_steal<py::object>(THPVariable_Wrap(grad));
    if (!given) throw python_error();
    PyObject *made = PyObject_CallFunctionObjArgs(backwards[kWhich], known.shape.spec.ptr(), given.ptr(), nullptr);
    if (made == nullptr) {
      python_error error;
      error.persist();
      throw std::move(error);
    }
    auto held = py::reinterpret_steal<py::object>(made);
    return THPVariable_Unpack(held.ptr());
  }

  static caffe2::TypeMeta dtype_of(const Known &known) {
    return c10::scalarTypeToTypeMeta(
        reinterpret_cast<THPDtype *>(known.gradient.spec.attr("dtype").ptr())->scalar_type);
  }
};

using NodePtr = decltype(torch::autograd::Edge::function);

// A std::shared_ptr before torch 2.13, freed as torch frees its own: without recursion along the graph.
template <typename Made>
NodePtr make_node(Made *&made) {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<Node>>) {
    made = new Made;
    return NodePtr(made, [](auto *node) { deleteNode(node); });
  } else {
    auto node = c10::make_intrusive<Made>();
    made = node.get();
    return node;
  }
}

template <Function kWhich>
void attach(const at::Tensor &result, const at::Tensor &input, KnownPtr known) {
  Backward<kWhich> *made = nullptr;
  NodePtr node = make_node(made);
  made->known = std::move(known);
  made->set_next_edges(torch::autograd::collect_next_edges(input));
  torch::autograd::set_history(result, node);
}

// A view that nobody may write into: its history is not that of what it views.
at::Tensor view_of(const at::Tensor &local) {
  at::NoGradGuard guard;
  at::Tensor made = local.view_as(local);
  torch::autograd::impl::get_view_autograd_meta(made)->set_creation_meta(
      torch::autograd::CreationMeta::IN_CUSTOM_FUNCTION);
  return made;
}

}  // namespace

// ---- functions of the module ----------------------------------------------------------------------------------------

void forget_gradients() {
  // The objects that they hold are freed last: that may run Python, which may call this.
  std::unordered_map<PyObject *, KnownPtr> old;
  std::swap(old, known_specs);
}

PyObject *record(PyObject *, PyObject *given) {
  PyObject *made[1 + kFunctions];
  if (!PyArg_ParseTuple(given, "OOOO", &made[0], &made[1], &made[2], &made[3])) return nullptr;
  for (PyObject *one : made) Py_INCREF(one);
  gradient_of = made[0];
  for (size_t i = 0; i < kFunctions; ++i) backwards[i] = made[1 + i];
  Py_RETURN_NONE;
}

PyObject *from_local(PyObject *, PyObject *const *given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 2, "from_local takes a tensor and a Spec");
  if (!THPVariable_CheckExact(given[0]) || !is_plain_call()) Py_RETURN_NONE;
  const at::Tensor &local = THPVariable_Unpack(given[0]);
  if (!is_plain(local) || !wants_history(local)) Py_RETURN_NONE;
  KnownPtr about = know(given[1]);
  if (!about) Py_RETURN_NONE;
  at::Tensor made = wrapped(local.detach(), about->shape);
  attach<kFromLocal>(made, local, std::move(about));
  return THPVariable_Wrap(made);
  END_HANDLE_TH_ERRORS
}

PyObject *to_local(PyObject *, PyObject *tensor) {
  HANDLE_TH_ERRORS
  KnownPtr about = know_recorded(tensor);
  if (!about) Py_RETURN_NONE;
  at::Tensor made = view_of(THPVariable_Unpack(slot(tensor, local_at)));
  attach<kToLocal>(made, THPVariable_Unpack(tensor), std::move(about));
  return THPVariable_Wrap(made);
  END_HANDLE_TH_ERRORS
}

PyObject *is_recorded(PyObject *, PyObject *tensor) {
  HANDLE_TH_ERRORS
  return PyBool_FromLong(know_recorded(tensor) != nullptr);
  END_HANDLE_TH_ERRORS
}

PyObject *redistributed(PyObject *, PyObject *const *given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 2 && Py_TYPE(given[0]) == dtensor && Py_TYPE(given[1]) == dtensor,
                   "redistributed takes two DTensors");
  const at::Tensor &before = THPVariable_Unpack(given[0]), &made = THPVariable_Unpack(given[1]);
  KnownPtr about = know(slot(given[0], spec_at));
  TORCH_CHECK(about, "redistributed takes a DTensor for which is_recorded is true");
  if (slot(given[1], local_at) == slot(given[0], local_at)) {
    // To write into the result is not to write into the input.
    const at::Tensor local = view_of(THPVariable_Unpack(slot(given[1], local_at)));
    auto view = py::reinterpret_steal<py::object>(THPVariable_Wrap(local));
    if (!view) throw python_error();
    PyObject *old = std::exchange(slot(given[1], local_at), view.release().ptr());
    Py_DECREF(old);
  }
  attach<kRedistribute>(made, before, std::move(about));
  Py_INCREF(given[1]);
  return given[1];
  END_HANDLE_TH_ERRORS
}

}  // namespace phalanx
