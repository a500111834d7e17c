// Memory of the late device: host memory, cached by stream, reused at once, and filled with NaN when it is freed.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

#include <cstddef>

namespace late {

c10::DeviceAllocator* device_memory();
c10::Allocator* pinned_memory();

bool is_pinned(const void* pointer);
// Keeps the pinned block of `pointer` from reuse until as many calls of unpin.
void pin(const void* pointer);
void unpin(const void* pointer);

void resize_storage(const c10::Storage& storage, size_t bytes);

}  // namespace late
