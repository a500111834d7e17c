#include "twins.h"

#include <c10/core/Allocator.h>

namespace late {
namespace {

size_t extent(const at::Tensor& tensor) {  // bytes of the storage that the tensor reaches to
  if (tensor.numel() == 0) return 0;
  int64_t last = tensor.storage_offset();
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return static_cast<size_t>(last + 1) * tensor.itemsize();
}

c10::Storage twin_storage(const c10::Storage& storage, at::DeviceType device) {
  const bool host = device == at::kCPU;
  c10::DataPtr memory(host ? const_cast<void*>(storage.data()) : nullptr, c10::Device(device));
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(memory),
                      host ? nullptr : c10::GetAllocator(at::kMeta), /*resizable=*/!host);
}

}  // namespace

at::Tensor Twins::of(const at::Tensor& tensor) {
  at::Tensor& twin = tensors_[tensor.unsafeGetTensorImpl()];
  if (twin.defined()) return twin;
  const c10::Storage& storage = tensor.storage();
  TORCH_CHECK(device_ == at::kMeta || extent(tensor) <= storage.nbytes(), "a tensor of shape ", tensor.sizes(),
              " reaches beyond its storage of ", storage.nbytes(), " bytes: was it resized to free its memory?");
  auto made = storages_.find(storage.unsafeGetStorageImpl());
  if (made == storages_.end())
    made = storages_.emplace(storage.unsafeGetStorageImpl(), twin_storage(storage, device_)).first;
  const auto key = device_ == at::kCPU ? c10::DispatchKey::CPU : c10::DispatchKey::Meta;
  twin = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(made->second), c10::DispatchKeySet(key), tensor.dtype());
  auto* impl = twin.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return twin;
}

}  // namespace late
