// Operators of the late device: each is queued on the current stream, as the CPU's kernel on host twins of its tensors.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <vector>

#include "memory.h"
#include "shapes.h"
#include "timeline.h"
#include "twins.h"

namespace late {
namespace {

using at::IntArrayRef;
using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

constexpr c10::DispatchKeySet LATE_KEY(c10::DispatchKey::PrivateUse1);

// Kernels below see neither autograd nor modes: those have acted already, when the operator was called.
struct Below {
  c10::impl::ExcludeDispatchKeyGuard keys{c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
                                          c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                                                               c10::DispatchKey::Functionalize,
                                                               c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                                                               c10::DispatchKey::FuncTorchDynamicLayerBackMode})};
};

void sync() { force_stream(current_stream()); }

Tensor empty_strided_late(IntArrayRef size, IntArrayRef stride, at::ScalarType dtype) {
  return at::detail::empty_strided_generic(size, stride, device_memory(), LATE_KEY, dtype);
}

// ---- The arguments of a call, for another device.

class Arguments {
 public:
  explicit Arguments(at::DeviceType device) : device_(device), twins_(device) {}

  Stack of(const std::vector<IValue>& values) {
    Stack made;
    for (const IValue& value : values) made.push_back(of(value));
    return made;
  }

  Tensor of(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (is_late(tensor)) return twins_.of(tensor);
    if (tensor.dim() == 0) return device_ == at::kMeta ? tensor : tensor.clone();  // by value, as of the call
    return device_ == at::kMeta ? twins_.of(tensor) : tensor.clone();
  }

 private:
  IValue of(const IValue& value) {
    if (value.isTensor()) return of(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> made;
      for (const Tensor& tensor : value.toTensorVector()) made.push_back(of(tensor));
      return made;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> made;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
        made.push_back(tensor ? std::optional<Tensor>(of(*tensor)) : std::nullopt);
      return made;
    }
    if (value.isDevice()) return c10::Device(device_);
    return value;
  }

  const at::DeviceType device_;
  Twins twins_;
};

// ---- What a call returns: one of its arguments, a view of one, or a fresh tensor.

const IValue* aliased(const c10::FunctionSchema& schema, const c10::Argument& result, const std::vector<IValue>& arguments) {
  const c10::AliasInfo* alias = result.alias_info();
  if (alias == nullptr) return nullptr;
  for (size_t each = 0; each < arguments.size(); ++each) {
    const c10::AliasInfo* candidate = schema.arguments()[each].alias_info();
    if (candidate != nullptr && candidate->beforeSets() == alias->beforeSets()) return &arguments[each];
  }
  return nullptr;
}

bool is_written(const c10::Argument& argument) { return argument.alias_info() != nullptr && argument.alias_info()->isWrite(); }

Tensor view_of(const Tensor& base, const Tensor& shape) {
  if (!shape.defined()) return shape;
  Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(),
                                                         shape.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides(), shape.storage_offset());
  return view;
}

Tensor like(const Tensor& shape) {
  return shape.defined() ? empty_strided_late(shape.sizes(), shape.strides(), shape.scalar_type()) : Tensor();
}

template <typename F>
IValue map_tensors(const IValue& value, F made) {
  if (value.isTensor()) return made(value.toTensor());
  c10::List<Tensor> all;
  for (const Tensor& tensor : value.toTensorVector()) all.push_back(made(tensor));
  return all;
}

std::vector<Tensor> tensors_of(const IValue& value) {
  return value.isTensor() ? std::vector<Tensor>{value.toTensor()} : value.toTensorVector();
}

void write(const std::vector<Tensor>& targets, const std::vector<Tensor>& sources) {
  for (size_t each = 0; each < targets.size(); ++each)
    if (targets[each].defined() && sources[each].defined()) targets[each].copy_(sources[each]);
}

// ---- Random numbers are drawn on the host during the call, so that their order is the program's.

bool only_fills(const c10::FunctionSchema& schema) {  // an operator such as normal_, whose result does not depend on `self`
  if (schema.returns().size() != 1 || !is_written(schema.arguments()[0]) || schema.name().back() != '_') return false;
  for (size_t each = 1; each < schema.arguments().size(); ++each)
    if (schema.arguments()[each].type()->kind() == c10::TypeKind::TensorType) return false;
  return true;
}

void fill(const c10::OperatorHandle& op, Stack* stack) {
  std::vector<IValue> arguments = torch::jit::pop(*stack, op.schema().arguments().size());
  const Tensor self = arguments[0].toTensor();
  stack->push_back(self);
  Below below;
  const Tensor drawn = at::detail::empty_strided_cpu(self.sizes(), self.strides(), self.scalar_type());
  arguments[0] = drawn;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &arguments);
  submit(current_stream(), [target = host_twin(self), drawn] { Below below; target.copy_(drawn); });
}

// The CPU's dropout, in the same operations: torch would take a fused one, with other roundings.
Tensor dropout(const Tensor& input, double p, bool train) {
  TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
  if (p == 0 || !train || input.numel() == 0) return input;
  const bool dense = input.is_non_overlapping_and_dense();
  Tensor noise = dense ? at::detail::empty_strided_cpu(input.sizes(), input.strides(), input.scalar_type())
                       : Tensor(at::detail::empty_cpu(input.sizes(), input.scalar_type()));
  if (p == 1) noise.zero_();
  else noise.bernoulli_(1 - p).div_(1 - p);
  return input.mul(noise.to(input.device(), /*non_blocking=*/true));
}

Tensor& dropout_(Tensor& input, double p, bool train) { return input.copy_(dropout(input, p, train)); }

// ---- Calls whose results the host must know: at once, after a synchronisation.

void at_once(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const std::vector<IValue> arguments = torch::jit::pop(*stack, schema.arguments().size());
  sync();
  Below below;
  Stack results = Arguments(at::kCPU).of(arguments);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &results);
  for (size_t each = 0; each < results.size(); ++each) {
    const IValue* argument = aliased(schema, schema.returns()[each], arguments);
    if (argument != nullptr) {
      stack->push_back(*argument);
      continue;
    }
    if (!results[each].isTensor() && !results[each].isTensorList()) {
      stack->push_back(results[each]);
      continue;
    }
    stack->push_back(map_tensors(results[each], [](const Tensor& result) {
      Tensor made = like(result);
      if (made.defined()) submit(current_stream(), [target = host_twin(made), result] { Below below; target.copy_(result); });
      return made;
    }));
  }
}

bool must_be_at_once(const c10::OperatorHandle& op) {
  for (const auto& result : op.schema().returns()) {
    const auto kind = result.type()->kind();
    const bool list = kind == c10::TypeKind::ListType && result.type()->cast<c10::ListType>()->getElementType()->kind() ==
                                                             c10::TypeKind::TensorType;
    if (kind != c10::TypeKind::TensorType && !list) return true;
  }
  return op.hasTag(at::Tag::nondeterministic_seeded) || op.hasTag(at::Tag::data_dependent_output) ||
         op.hasTag(at::Tag::dynamic_output_shape);
}

// ---- All other calls.

bool needs_shapes(const c10::FunctionSchema& schema, const std::vector<IValue>& arguments) {
  for (const auto& result : schema.returns())
    if (!is_written(result)) return true;
  for (size_t each = 0; each < arguments.size(); ++each)  // an `out` that the caller left to the operator to shape
    if (schema.arguments()[each].is_out() && arguments[each].isTensor() && arguments[each].toTensor().numel() == 0) return true;
  return false;
}

// The CPU's norms give their statistics in the dtype of the input; the shapes are those of devices that give fp32.
void shape_statistics(const c10::FunctionSchema& schema, const std::vector<IValue>& arguments, Stack& shapes) {
  if (schema.name() != "aten::native_layer_norm" && schema.name() != "aten::native_group_norm") return;
  const Tensor input = arguments[0].toTensor();
  for (const IValue& argument : arguments)
    if (argument.isTensor() && argument.toTensor().defined() && argument.toTensor().scalar_type() != input.scalar_type()) return;
  for (size_t each : {1, 2}) shapes[each] = shapes[each].toTensor().to(input.scalar_type());
}

Stack shapes_of_results(const c10::OperatorHandle& op, const std::vector<IValue>& arguments) {
  const std::optional<std::string> call = signature(op, arguments);
  if (call)
    if (std::optional<Stack> shapes = kept_shapes(*call)) return *std::move(shapes);
  Below below;
  Arguments meta(at::kMeta);
  Stack shapes = meta.of(arguments);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &shapes);
  shape_statistics(op.schema(), arguments, shapes);
  for (size_t each = 0; each < arguments.size(); ++each) {
    if (!op.schema().arguments()[each].is_out() || !arguments[each].isTensor()) continue;
    const Tensor out = arguments[each].toTensor(), shape = meta.of(out);
    if (out.sizes() != shape.sizes()) out.resize_(shape.sizes());
  }
  if (call) keep_shapes(*call, shapes);
  return shapes;
}

void deferred(const c10::OperatorHandle& op, Stack* stack) {
  if (op.hasTag(at::Tag::nondeterministic_seeded) && only_fills(op.schema())) return fill(op, stack);
  if (must_be_at_once(op)) return at_once(op, stack);
  const auto& schema = op.schema();
  const std::vector<IValue> arguments = torch::jit::pop(*stack, schema.arguments().size());
  const Stack shapes = needs_shapes(schema, arguments) ? shapes_of_results(op, arguments) : Stack();
  std::vector<IValue> fresh;       // results that the kernel makes, in the order of the returns
  std::vector<size_t> positions;   // of them among the returns
  bool views_only = !schema.returns().empty();
  for (size_t each = 0; each < schema.returns().size(); ++each) {
    const auto& result = schema.returns()[each];
    const IValue* argument = aliased(schema, result, arguments);
    if (argument != nullptr && is_written(result)) {
      stack->push_back(*argument);
      views_only = false;
    } else if (argument != nullptr) {
      const Tensor base = argument->toTensor();
      stack->push_back(map_tensors(shapes[each], [&](const Tensor& shape) { return view_of(base, shape); }));
    } else {
      fresh.push_back(map_tensors(shapes[each], like));
      positions.push_back(each);
      stack->push_back(fresh.back());
      views_only = false;
    }
  }
  if (views_only) return;
  Below below;
  Arguments host(at::kCPU);
  Stack inputs = host.of(arguments);
  std::vector<std::vector<Tensor>> targets;
  for (const IValue& value : fresh) {
    targets.emplace_back();
    for (const Tensor& tensor : tensors_of(value)) targets.back().push_back(host.of(tensor));
  }
  submit(current_stream(), [op, inputs = std::move(inputs), targets = std::move(targets), positions]() mutable {
    Below below;
    Stack results = std::move(inputs);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &results);
    for (size_t each = 0; each < positions.size(); ++each) write(targets[each], tensors_of(results[positions[each]]));
  });
}

// ---- Memory and shape.

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, device_memory(), LATE_KEY, dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device>, std::optional<bool>) {
  return empty_strided_late(size, stride, dtype.value_or(at::get_default_dtype_as_scalartype()));
}

const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  const size_t bytes = static_cast<size_t>(self.storage_offset() + self.numel()) * self.itemsize();
  if (self.numel() != 0 && bytes > self.storage().nbytes()) resize_storage(self.storage(), bytes);
  return self;
}

Tensor& set_nothing(Tensor& self) {
  return at::native::set_(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, device_memory(), true));
}

Tensor& set_storage(Tensor& self, at::Storage source) { return at::native::set_(self, std::move(source)); }

// ---- Copies and reads.

// Returns the twin of pinned host memory, whose block is not reused before `unpin` in a task.
Tensor pinned_twin(const Tensor& host) {
  pin(host.storage().data());
  return host_twin(host);
}

bool goes_behind_the_host(const Tensor& host, bool non_blocking) {
  return non_blocking && host.numel() != 0 && is_pinned(host.storage().data());
}

void upload(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (goes_behind_the_host(source, non_blocking)) {
    submit(current_stream(), [from = pinned_twin(source), to = host_twin(target)] {
      Below below;
      to.copy_(from);
      unpin(from.storage().data());
    });
    return;
  }
  // Pageable memory is read during the call, whatever happens later on the device.
  submit(current_stream(), [from = source.clone(), to = host_twin(target)] { Below below; to.copy_(from); });
  if (!non_blocking) sync();
}

void download(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (goes_behind_the_host(target, non_blocking)) {
    submit(current_stream(), [from = host_twin(source), to = pinned_twin(target)] {
      Below below;
      to.copy_(from);
      unpin(to.storage().data());
    });
    return;
  }
  sync();
  host_twin(target).copy_(host_twin(source));
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  Below below;
  if (!is_late(target)) download(source, target, non_blocking);
  else if (!is_late(source)) upload(source, target, non_blocking);
  else submit(current_stream(), [from = host_twin(source), to = host_twin(target)] { Below below; to.copy_(from); });
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const Tensor& self) {
  sync();
  Below below;
  return host_twin(self).item();
}

// A parameter of the host may become one of the device by `parameter.data = ...`, as with the devices that torch knows.
bool may_hold_data_of(const Tensor& self, const Tensor& from) { return self.layout() == from.layout(); }

void record_stream(Tensor& self, c10::Stream stream) { device_memory()->recordStream(self.storage().data_ptr(), stream); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&deferred>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &resize_);
  m.impl("set_", &set_nothing);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream);
  m.impl("_has_compatible_shallow_copy_type", &may_hold_data_of);
  // Composite kernels would run in place of these, with other roundings than the CPU's own.
  for (const char* name : {"native_layer_norm", "native_group_norm", "addr", "addr.out", "linalg__powsum"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&deferred>());
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("dropout", &dropout);
  m.impl("dropout_", &dropout_);
}

}  // namespace
}  // namespace late
