// Twins: tensors of another device that stand for tensors of the late device.
//
// A host twin has the same memory and runs the CPU's kernels on it; a meta twin has the same shape and no memory. Twins of
// one call share storages as their originals do.
#pragma once

#include <ATen/core/Tensor.h>

#include <unordered_map>

namespace late {

inline bool is_late(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == at::kPrivateUse1; }

class Twins {
 public:
  explicit Twins(at::DeviceType device) : device_(device) {}

  // Returns the twin of any tensor that has memory; the memory of a host twin is not kept alive.
  at::Tensor of(const at::Tensor& tensor);

 private:
  const at::DeviceType device_;
  std::unordered_map<c10::TensorImpl*, at::Tensor> tensors_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
};

inline at::Tensor host_twin(const at::Tensor& tensor) { return Twins(at::kCPU).of(tensor); }

}  // namespace late
