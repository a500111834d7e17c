// Shapes of the results of calls, kept by all that a meta kernel sees of the arguments: many meta kernels are Python's, and
// take longer than the call itself.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <string>
#include <vector>

namespace late {

// Returns text that is the same for calls whose results have the same shapes; nothing where an argument is of a kind that it
// does not read, or where the operator may resize one.
std::optional<std::string> signature(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments);

// What was kept under that text: the results, as tensors of the meta device.
std::optional<torch::jit::Stack> kept_shapes(const std::string& signature);

void keep_shapes(const std::string& signature, const torch::jit::Stack& shapes);

}  // namespace late
