// Autograd's side of a rank's passes in C++: what runtime/grad_accumulation.py and runtime/param_hooks.py do most often.
// native/load.py builds it. Whatever is not common is left to Python, which decides anew.
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_zero.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

namespace {
namespace ag = torch::autograd;
using at::Tensor;

// A reference to a Python object that any thread may drop.
using Kept = std::shared_ptr<PyObject>;

Kept keep(PyObject* object) {
    Py_INCREF(object);
    return Kept(object, [](PyObject* x) {
        if (!Py_IsInitialized()) return;
        py::gil_scoped_acquire lock;
        Py_DECREF(x);
    });
}

[[noreturn]] void raise() {  // Python's error, on any thread of autograd
    python_error error;
    error.persist();
    throw std::move(error);
}

// Nodes are counted inside or outside of themselves, by version of torch.
template <class N>
auto made() {
    if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, N>)
        return c10::make_intrusive<N>();
    else
        return std::shared_ptr<N>(new N(), [](N* node) { deleteNode(node); });
}

// A storage may forbid reads, with an error's text.
void forbid_reads(c10::StorageImpl& s, const std::string& error) { s.release_data_and_set_meta_custom_data_ptr_error_msg_(error); }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
void allow_reads(c10::StorageImpl& s) { s.clear_data_ptr_access_error_msg_(); }
#else  // which knows no way back
template <bool c10::StorageImpl::* member>
struct Member {
    friend bool& forbids(c10::StorageImpl& s) { return s.*member; }
};
bool& forbids(c10::StorageImpl&);
template struct Member<&c10::StorageImpl::throw_on_immutable_data_ptr_>;
void allow_reads(c10::StorageImpl& s) { forbids(s) = false; }
#endif

c10::StorageImpl& storage_of(const Tensor& x) { return *x.storage().unsafeGetStorageImpl(); }

// Bytes whose address changes: views of them, and what autograd saves of these, follow.
class Memory {
   public:
    // Of ``size`` bytes on the device of ``like``, nowhere at first. ``away``: the error of a read while they are nowhere.
    Memory(int64_t size, const Tensor& like, std::string away) : away_(std::move(away)) {
        at::Storage storage(at::Storage::use_byte_size_t(), size, at::DataPtr(nullptr, like.device()), nullptr, false);
        bytes_ = at::empty({0}, like.options().dtype(at::kByte)).set_(storage, 0, {size}, {1});
        take_away();
    }
    void move_to(const Tensor& flat) {
        auto* kept = new at::Storage(flat.storage());
        auto drop = [](void* x) { delete static_cast<at::Storage*>(x); };
        allow_reads(storage_of(bytes_));
        storage_of(bytes_).set_data_ptr_noswap(at::DataPtr(flat.data_ptr(), kept, drop, flat.device()));
    }
    void take_away() {
        storage_of(bytes_).set_data_ptr_noswap(at::DataPtr(nullptr, bytes_.device()));
        forbid_reads(storage_of(bytes_), away_);
    }
    const Tensor& bytes() const { return bytes_; }

   private:
    Tensor bytes_;
    std::string away_;
};

// A linear layer that adds its weight's gradient to the sum. The Python object that has it keeps all that it points to alive.
class Layer {
   public:
    Layer(py::handle self, py::handle functional)
        : self_(self), accumulation_(self.attr("accumulation")), passes_(self.attr("passes")), module_(self.attr("module")),
          parameters_(self.attr("parameters")), sums_(accumulation_.attr("_in_use")), empty_(accumulation_.attr("_empty")),
          summed_(accumulation_.attr("_summed")), weight_object_(self.attr("weight")), functional_(functional),
          unit_(self.attr("unit")), slot_(self.attr("slot")), weight_(THPVariable_Unpack(weight_object_.ptr())),
          kind_(py::type::of(module_)), stock_forward_(kind_.attr("forward")), stock_linear_(functional["linear"]) {}

    void remove() {
        fused_ = false;
        weight_ = Tensor();
        views_.clear();
    }

    // The layer's output; None where Python must decide.
    py::object forward(py::handle input);

    // Prepare the weight for the backward. With ``sum``, the weight's gradient is wanted there.
    // Returns the sum to add to; undefined: the gradient takes autograd's way.
    Tensor backward(const Tensor& x, uint32_t version, ag::Node* accumulator, bool for_weight, bool& starts);

    const Tensor& weight() const { return weight_; }
    void forget_views() { views_.clear(); }

   private:
    Tensor view_of(PyObject* flat) {
        void* at = THPVariable_Unpack(flat).data_ptr();
        auto found = views_.find(at);
        if (found != views_.end()) return found->second;
        py::sequence all = accumulation_.attr("views")(unit_, py::handle(flat));
        return views_[at] = py::cast<Tensor>(all[py::cast<size_t>(slot_)]);
    }

    bool in_pass() const {  // whether the model is in a pass of the layer's unit
        static PyObject* name = PyUnicode_InternFromString("in_pass");
        PyObject* unit = PyObject_GetAttr(passes_.ptr(), name);
        if (!unit) PyErr_Clear();  // Python looks, too, and raises
        bool is = unit && PyObject_RichCompareBool(unit, unit_.ptr(), Py_EQ) == 1;
        Py_XDECREF(unit);
        return is;
    }

    py::handle self_, accumulation_, passes_, module_, parameters_, sums_, empty_, summed_, weight_object_, functional_;
    py::object unit_, slot_;
    Tensor weight_;
    py::object kind_, stock_forward_, stock_linear_;
    bool fused_ = true;
    std::unordered_map<void*, Tensor> views_;  // by address of a flat sum
};

struct FusedLinear : ag::Node {
    Kept owner;  // of the layer
    Layer* layer = nullptr;
    ag::SavedVariable x;
    uint32_t version = 0;

    std::string name() const override { return "FusedLinearBackward"; }
    void release_variables() override { x.reset_data(); }

    ag::variable_list apply(ag::variable_list&& grads) override {
        ag::variable_list out(3);
        if (!grads[0].defined()) return out;
        const Tensor input = x.unpack(), &grad = grads[0];
        bool for_weight = task_should_compute_output(1), starts = false;
        const ag::Edge& edge = next_edge(1);
        Tensor sum = layer->backward(input, version, edge.function.get(), for_weight, starts);
        const Tensor rows = grad.reshape({-1, grad.size(-1)}), inputs = input.reshape({-1, input.size(-1)});
        if (task_should_compute_output(0)) out[0] = rows.mm(layer->weight()).view(input.sizes());
        if (!sum.defined()) {
            if (for_weight) out[1] = rows.t().mm(inputs);
        } else if (starts) {
            at::mm_out(sum, rows.t(), inputs);
        } else {
            at::addmm_out(sum, sum, rows.t(), inputs);
        }
        if (task_should_compute_output(2)) out[2] = rows.sum(0);
        return out;
    }
};

// Whether the rows of x lie one after the other. Of others torch.nn.functional.linear makes one product only if the weight
// requires gradients, which its transpose does not below autograd.
bool in_rows(const Tensor& x) {
    for (int64_t k = 0; k + 2 < x.dim(); ++k)
        if (x.stride(k) != x.stride(k + 1) * x.size(k + 1)) return false;
    return true;
}

py::object Layer::forward(py::handle input) {
    if (!fused_ || !at::GradMode::is_enabled() || reinterpret_cast<PyObject*>(Py_TYPE(input.ptr())) != THPVariableClass)
        return py::none();
    static PyObject *weight = PyUnicode_InternFromString("weight"), *bias = PyUnicode_InternFromString("bias"),
                    *linear = PyUnicode_InternFromString("linear"), *forward = PyUnicode_InternFromString("forward");
    const Tensor& x = THPVariable_Unpack(input.ptr());
    PyObject* b = PyDict_GetItem(parameters_.ptr(), bias);
    if (PyDict_GetItem(parameters_.ptr(), weight) != weight_object_.ptr() || !b || !(b == Py_None || THPVariable_CheckExact(b)) ||
        x.scalar_type() != weight_.scalar_type() || !weight_.requires_grad() || x.layout() != at::kStrided || !in_rows(x) ||
        c10::impl::TorchDispatchModeTLS::any_modes_set() ||  // which see the operators of linear above autograd
        reinterpret_cast<PyObject*>(Py_TYPE(module_.ptr())) != kind_.ptr() ||
        PyDict_GetItem(functional_.ptr(), linear) != stock_linear_.ptr() || at::impl::PythonTorchFunctionTLS::stack_len() ||
        at::autocast::is_autocast_enabled(x.device().type()) ||
        c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
        c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode) ||
        x.key_set().has(c10::DispatchKey::FuncTorchGradWrapper) || x.key_set().has(c10::DispatchKey::FuncTorchBatched) ||
        ag::ForwardADLevel::try_get_by_idx(0))
        return py::none();
    auto known = py::reinterpret_steal<py::object>(PyObject_GetAttr(kind_.ptr(), forward));
    if (!known) throw py::error_already_set();
    if (known.ptr() != stock_forward_.ptr()) return py::none();
    if (!in_pass()) return py::none();

    const Tensor given = b == Py_None ? Tensor() : THPVariable_Unpack(b);
    auto node = made<FusedLinear>();
    node->set_next_edges(ag::collect_next_edges(x, weight_, given));
    node->owner = keep(self_.ptr());
    node->layer = this;
    node->version = weight_._version();
    node->x = ag::SavedVariable(x, false);
    Tensor y;
    {
        py::gil_scoped_release unlock;
        at::AutoDispatchBelowADInplaceOrView below;
        y = at::linear(x, weight_, given.defined() ? std::optional<Tensor>(given) : std::nullopt);
    }
    ag::set_history(y, node);
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(y)));
}

Tensor Layer::backward(const Tensor& x, uint32_t version, ag::Node* accumulator, bool for_weight, bool& starts) {
    py::gil_scoped_acquire lock;
    static PyObject* prepare = PyUnicode_InternFromString("prepare_backward_read");
    if (!fused_) {
        auto told = py::module_::import("deepspeed_cdp.runtime.grad_accumulation").attr("AFTER_DESTROY");
        PyErr_SetObject(PyExc_ValueError, told.ptr());
        raise();
    }
    if (!in_pass()) {
        PyObject* done = PyObject_CallMethodOneArg(passes_.ptr(), prepare, unit_.ptr());
        if (!done) raise();
        Py_DECREF(done);
    }
    TORCH_CHECK(weight_._version() == version,
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                "the weight of a linear layer");
    if (!for_weight || at::GradMode::is_enabled() || !weight_.requires_grad() || !ag::impl::hooks(weight_).empty() ||
        ag::impl::post_acc_grad_hooks(weight_))
        return Tensor();
    const auto* wanted = ag::get_current_graph_task_exec_info();  // empty: all nodes run
    if (wanted && !wanted->empty()) {
        auto at = wanted->find(accumulator);
        if (at == wanted->end() || !at->second.needed_ || at->second.captures_) return Tensor();
    }
    PyObject* flat = PyDict_GetItem(sums_.ptr(), unit_.ptr());
    if (!flat) return Tensor();
    Tensor sum = view_of(flat);
    if (sum.scalar_type() != x.scalar_type()) return Tensor();
    PyObject* summed = PyDict_GetItem(summed_.ptr(), unit_.ptr());
    if (!summed) {
        auto fresh = py::reinterpret_steal<py::object>(PySet_New(nullptr));
        PyDict_SetItem(summed_.ptr(), unit_.ptr(), fresh.ptr());
        summed = fresh.ptr();
    }
    starts = PySet_Contains(empty_.ptr(), unit_.ptr()) == 1 && PySet_Contains(summed, slot_.ptr()) == 0;
    PySet_Add(summed, slot_.ptr());
    return sum;
}

// Parameters and the tensors that become their data, for one place of a unit.
class Views {
   public:
    Views(const std::vector<py::object>& parameters, const std::vector<Tensor>& values) : values_(values) {
        for (const py::object& p : parameters) parameters_.push_back(py::cast<Tensor>(p));
    }
    void show() const {
        for (size_t k = 0; k < values_.size(); ++k) {
            const Tensor &p = parameters_[k], &value = values_[k];
            if (p.dtype() == value.dtype() && p.device() == value.device() && p.key_set() == value.key_set())
                p.unsafeGetTensorImpl()->shallow_copy_from(value.getIntrusivePtr());  // set_data ends so, too, after costly checks
            else
                p.set_data(value);
        }
    }
    bool has_grads() const {
        return std::any_of(parameters_.begin(), parameters_.end(), [](const Tensor& p) { return p.grad().defined(); });
    }

   private:
    std::vector<Tensor> parameters_, values_;
};

// GradAccumulation.add of a unit's parameters, whose sums are ``sums``; ``summed``: slots that already have their gradients there.
void add_grads(const std::vector<Tensor>& parameters, const std::vector<Tensor>& sums, bool first, py::handle summed) {
    at::NoGradGuard no_grad;
    std::vector<Tensor> empty, copied, copies, added, addends;
    bool dense = true;
    for (size_t k = 0; k < parameters.size(); ++k) {
        Tensor grad = std::move(parameters[k].mutable_grad());  // which is None then
        if (k >= sums.size()) continue;
        bool has = grad.defined(), strided = has && grad.layout() == at::kStrided;
        if (first && !summed.contains(k)) {
            (strided ? copied : empty).push_back(sums[k]);
            if (strided) {
                copies.push_back(std::move(grad));
                continue;
            }
        }
        if (has) {
            dense &= strided;
            added.push_back(sums[k]);
            addends.push_back(std::move(grad));
        }
    }
    if (!empty.empty()) at::_foreach_zero_(empty);
    if (!copied.empty()) at::_foreach_copy_(copied, copies);
    if (dense && !added.empty()) at::_foreach_add_(added, addends);
    for (size_t k = 0; k < added.size() && !dense; ++k) added[k].add_(addends[k]);
}

// Call ``function(unit)`` before the gradient of x goes on into its graph.
void before_grad(const Tensor& x, py::object function, py::object unit) {
    Kept call = keep(function.ptr()), argument = keep(unit.ptr());
    x.register_hook([call, argument](const Tensor&) {
        py::gil_scoped_acquire lock;
        PyObject* done = PyObject_CallOneArg(call.get(), argument.get());
        if (!done) raise();
        Py_DECREF(done);
    });
}
// Whether ``x`` is among arguments of plain kinds: 0 or 1; -1: there are others.
int holds(PyObject* tree, PyObject* x) {
    if (tree == x) return 1;
    if (tree == Py_None || PyBool_Check(tree) || PyLong_Check(tree) || PyFloat_Check(tree) || PyUnicode_Check(tree) ||
        THPVariable_Check(tree))
        return 0;
    if (PyTuple_Check(tree) || PyList_Check(tree)) {
        for (Py_ssize_t k = 0; k < PySequence_Fast_GET_SIZE(tree); ++k)
            if (int found = holds(PySequence_Fast_GET_ITEM(tree, k), x)) return found;
        return 0;
    }
    if (!PyDict_CheckExact(tree)) return -1;
    PyObject* value;
    for (Py_ssize_t at = 0; PyDict_Next(tree, &at, nullptr, &value);)
        if (int found = holds(value, x)) return found;
    return 0;
}

// ParamHooks._hook_outputs of one tensor: 1 + its node's number, 0 if it has none or may lose it; -1 where Python must do it.
int64_t hook_output(py::handle output, py::handle arguments, const Tensor& flat, py::object function, py::object unit) {
    if (!THPVariable_CheckExact(output.ptr())) return -1;
    const Tensor& x = THPVariable_Unpack(output.ptr());
    // a hook of C++ on a leaf drops the hooks that it has
    if (x.layout() != at::kStrided || (x.requires_grad() && x.is_leaf())) return -1;
    auto low = static_cast<char*>(flat.data_ptr()), at = static_cast<char*>(x.data_ptr());
    if (low <= at && at < low + flat.numel()) return -1;
    int held = holds(arguments.ptr(), output.ptr());
    if (held < 0) return -1;
    if (held || !x.requires_grad()) return 0;
    before_grad(x, std::move(function), std::move(unit));
    return x.is_view() ? 0 : 1 + static_cast<int64_t>(x.grad_fn()->sequence_nr());
}
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    py::class_<Memory>(m, "Memory")
        .def(py::init<int64_t, const Tensor&, std::string>())
        .def("move_to", &Memory::move_to)
        .def("take_away", &Memory::take_away)
        .def_property_readonly("bytes", &Memory::bytes);
    py::class_<Layer>(m, "Layer")
        .def(py::init<py::handle, py::handle>())
        .def("forward", &Layer::forward)
        .def("forget_views", &Layer::forget_views)
        .def("remove", &Layer::remove);
    py::class_<Views>(m, "Views")
        .def(py::init<const std::vector<py::object>&, const std::vector<Tensor>&>())
        .def("show", &Views::show)
        .def("has_grads", &Views::has_grads);
    m.def("forbid_reads", [](const Tensor& x, const std::string& error) { forbid_reads(storage_of(x), error); });
    m.def("allow_reads", [](const Tensor& x) { allow_reads(storage_of(x)); });
    m.def("add_grads", &add_grads);
    m.def("before_grad", &before_grad);
    m.def("hook_output", &hook_output);
}
