// What the process groups of tests do with tensors on the host.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <vector>

namespace collectives {

using Tensors = std::vector<at::Tensor>;

inline Tensors flat(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const Tensors& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

// The sum over the rows of `addends` in rank order, in fp32 where they are shorter.
inline at::Tensor reduced(const at::Tensor& addends, const c10d::ReduceOp& op) {
  const bool narrow = addends.is_floating_point() && addends.itemsize() < 4;
  at::Tensor total = narrow ? addends[0].to(at::kFloat) : addends[0].clone();
  for (int64_t rank = 1; rank < addends.size(0); ++rank) {
    if (op == c10d::ReduceOp::MAX) total = total.max(addends[rank]);
    else if (op == c10d::ReduceOp::MIN) total = total.min(addends[rank]);
    else total.add_(addends[rank]);
  }
  return op == c10d::ReduceOp::AVG ? total.div_(addends.size(0)) : total;
}

}  // namespace collectives
