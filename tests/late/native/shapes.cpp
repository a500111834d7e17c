#include "shapes.h"

#include <ATen/core/Tensor.h>
#include <c10/core/DefaultDtype.h>

#include <mutex>
#include <unordered_map>
#include <utility>

namespace late {
namespace {

constexpr size_t MOST = 1 << 14;  // calls whose shapes are kept; the shapes of others are worked out at each call

struct Kept {
  std::mutex mutex;
  std::unordered_map<std::string, torch::jit::Stack> shapes;
};

Kept& kept() {
  static Kept* made = new Kept;  // never destroyed: other threads may call operators after static destructors
  return *made;
}

class Signature {
 public:
  template <typename T>
  void put(T value) {
    static_assert(std::is_trivially_copyable_v<T>);
    text.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }

  // Returns whether the value is of a kind that is read here.
  bool add(const c10::IValue& value) {
    if (value.isTensor()) return add_tensor(value.toTensor());
    if (value.isList()) {
      put('l');
      put(value.toListRef().size());
      for (const c10::IValue& each : value.toListRef())
        if (!add(each)) return false;
      return true;
    }
    if (value.isNone()) return put('n'), true;
    if (value.isInt()) return put('i'), put(value.toInt()), true;
    if (value.isDouble()) return put('d'), put(value.toDouble()), true;
    if (value.isBool()) return put('b'), put(value.toBool()), true;
    if (value.isDevice()) return put('v'), true;
    if (!value.isString()) return false;
    put('s');
    put(value.toStringRef().size());
    text += value.toStringRef();
    return true;
  }

  std::string text;

 private:
  void add_numbers(at::IntArrayRef numbers) {
    put(numbers.size());
    for (int64_t number : numbers) put(number);
  }

  bool add_tensor(const at::Tensor& tensor) {
    put('t');
    put(tensor.defined());
    if (!tensor.defined()) return true;
    const bool number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
    if (tensor.layout() != at::kStrided) return false;
    if (tensor.device().is_cpu() && tensor.dim() == 0 && !number) return false;  // a kernel may read its value
    put(tensor.scalar_type());
    put(tensor.device().type());
    put(number);
    put(tensor.is_conj());
    put(tensor.is_neg());
    put(tensor.storage_offset());
    add_numbers(tensor.sizes());
    add_numbers(tensor.strides());
    return true;
  }
};

}  // namespace

std::optional<std::string> signature(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments) {
  Signature made;
  made.text = op.operator_name().name + '.' + op.operator_name().overload_name + '(';
  made.put(c10::get_default_dtype_as_scalartype());
  for (size_t each = 0; each < arguments.size(); ++each)
    if (op.schema().arguments()[each].is_out() || !made.add(arguments[each])) return std::nullopt;
  return std::move(made.text);
}

std::optional<torch::jit::Stack> kept_shapes(const std::string& signature) {
  const std::lock_guard lock(kept().mutex);
  const auto found = kept().shapes.find(signature);
  return found == kept().shapes.end() ? std::nullopt : std::optional(found->second);
}

void keep_shapes(const std::string& signature, const torch::jit::Stack& shapes) {
  const std::lock_guard lock(kept().mutex);
  if (kept().shapes.size() < MOST) kept().shapes.emplace(signature, shapes);
}

}  // namespace late
