#include "memory.h"

#include <ATen/core/CachingHostAllocator.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <vector>

#include "timeline.h"

namespace late {
namespace {

constexpr size_t ROUND = 512;
constexpr int NAN_BYTE = 0xFF;  // every floating-point type reads NaN, every integer -1
const c10::Device LATE(c10::DeviceType::PrivateUse1, 0);

size_t rounded(size_t bytes) { return (bytes + ROUND - 1) / ROUND * ROUND; }

void* new_memory(size_t bytes) {
  void* memory = nullptr;
  TORCH_CHECK(posix_memalign(&memory, 4096, bytes) == 0, "the late device is out of memory: asked for ", bytes, " bytes");
  std::memset(memory, NAN_BYTE, bytes);
  return memory;
}

struct Block {
  void* memory;
  size_t bytes;
  int64_t stream;            // it was allocated on, and is reused on
  std::set<int64_t> users;   // further streams, by record_stream
  std::vector<MarkPtr> marks;  // of those streams, at the time the block was freed
};

void free_block(void* context);

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, LATE};
    Guard guard;
    reclaim();
    Block* block = take(current_stream(), rounded(bytes));
    count(1, block->bytes);
    return {block->memory, block, &free_block, LATE};
  }

  void free(Block* block) {
    Guard guard;
    count(-1, block->bytes);
    for (int64_t user : block->users) block->marks.push_back(record(user));
    block->users.clear();
    if (block->marks.empty()) cache(block);
    else waiting_.push_back(block);
  }

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    if (pointer.get_deleter() != &free_block) return;
    Guard guard;
    auto* block = static_cast<Block*>(pointer.get_context());
    if (stream.id() != block->stream) block->users.insert(stream.id());
  }

  void emptyCache(c10::MempoolId_t) override {
    force_all();
    Guard guard;
    reclaim();
    for (auto& [stream, blocks] : free_) {
      for (auto& [bytes, block] : blocks) {
        if (queued() != 0) return;  // a task may still use the memory
        stats_.reserved_bytes[0].decrease(bytes);
        std::free(block->memory);
        delete block;
      }
      blocks.clear();
    }
  }

  bool initialized() override { return true; }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    Guard guard;
    return stats_;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {
    Guard guard;
    for (auto* stat : stats()) stat->reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex) override {
    Guard guard;
    for (auto* stat : stats()) stat->reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    constexpr size_t total = size_t{16} << 30;
    Guard guard;
    return {total - std::min(total, static_cast<size_t>(stats_.reserved_bytes[0].current)), total};
  }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    submit(current_stream(), [=] { std::memcpy(target, source, bytes); });
  }

 private:
  std::vector<c10::CachingAllocator::Stat*> stats() {
    return {&stats_.allocation[0], &stats_.allocated_bytes[0], &stats_.active_bytes[0], &stats_.reserved_bytes[0]};
  }

  void count(int sign, size_t bytes) {
    for (auto [stat, amount] : {std::pair{&stats_.allocation[0], size_t{1}}, {&stats_.allocated_bytes[0], bytes}})
      sign > 0 ? stat->increase(amount) : stat->decrease(amount);
    if (sign > 0) stats_.active_bytes[0].increase(bytes);
  }

  Block* take(int64_t stream, size_t bytes) {
    auto& blocks = free_[stream];
    auto found = blocks.lower_bound(bytes);
    if (found != blocks.end() && found->first <= 2 * bytes) {
      found = std::prev(blocks.upper_bound(found->first));  // of this size, the one freed last
      Block* block = found->second;
      blocks.erase(found);
      return block;
    }
    stats_.reserved_bytes[0].increase(bytes);
    return new Block{new_memory(bytes), bytes, stream, {}, {}};
  }

  void cache(Block* block) {
    stats_.active_bytes[0].decrease(block->bytes);
    submit(block->stream, [memory = block->memory, bytes = block->bytes] { std::memset(memory, NAN_BYTE, bytes); });
    free_[block->stream].emplace(block->bytes, block);
  }

  // Takes back the blocks whose other streams have passed the point at which they were freed.
  void reclaim() {
    auto used = [](const Block* block) {
      return std::any_of(block->marks.begin(), block->marks.end(), [](const MarkPtr& mark) { return !mark->reached; });
    };
    auto done = std::stable_partition(waiting_.begin(), waiting_.end(), used);
    for (auto each = done; each != waiting_.end(); ++each) {
      (*each)->marks.clear();
      cache(*each);
    }
    waiting_.erase(done, waiting_.end());
  }

  std::map<int64_t, std::multimap<size_t, Block*>> free_;
  std::vector<Block*> waiting_;
  c10::CachingDeviceAllocator::DeviceStats stats_;
};

struct HostBlock {
  char* memory;
  size_t bytes;
  int64_t copies = 0;  // queued, that read or write it
  bool used = true;
};

void free_host(void* context);

class PinnedMemory final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::DeviceType::CPU)};
    Guard guard;
    bytes = rounded(bytes);
    HostBlock* block = nullptr;
    auto found = std::find_if(blocks_.begin(), blocks_.end(), [bytes](const auto& each) {
      return !each.second->used && each.second->copies == 0 && each.second->bytes == bytes;
    });
    if (found != blocks_.end()) {
      block = found->second;
      block->used = true;
    } else {
      block = new HostBlock{static_cast<char*>(new_memory(bytes)), bytes};
      blocks_[block->memory] = block;
    }
    return {block->memory, block, &free_host, c10::Device(c10::DeviceType::CPU)};
  }

  void free(HostBlock* block) {
    Guard guard;
    block->used = false;
    spoil(block);
  }

  HostBlock* find(const void* pointer) {
    auto after = blocks_.upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
    if (after == blocks_.begin()) return nullptr;
    HostBlock* block = std::prev(after)->second;
    return pointer < block->memory + block->bytes ? block : nullptr;
  }

  void hold(const void* pointer, int64_t copies) {
    Guard guard;
    HostBlock* block = find(pointer);
    block->copies += copies;
    if (!block->used) spoil(block);
  }

  bool record_event(void* pointer, void*, c10::Stream stream) override {
    {
      Guard guard;
      if (find(pointer) == nullptr) return false;
    }
    hold(pointer, 1);
    submit(stream.id(), [this, pointer] { hold(pointer, -1); });
    return true;
  }

  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
  void copy_data(void* target, const void* source, size_t bytes) const override { std::memcpy(target, source, bytes); }

 private:
  static void spoil(HostBlock* block) {
    if (block->copies == 0) std::memset(block->memory, NAN_BYTE, block->bytes);
  }

  std::map<char*, HostBlock*> blocks_;
};

DeviceMemory& the_device_memory() {
  static auto* made = new DeviceMemory;
  return *made;
}

PinnedMemory& the_pinned_memory() {
  static auto* made = new PinnedMemory;
  return *made;
}

void free_block(void* context) { the_device_memory().free(static_cast<Block*>(context)); }
void free_host(void* context) { the_pinned_memory().free(static_cast<HostBlock*>(context)); }

const bool registered = [] {
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &the_device_memory());
  at::setHostAllocator(c10::DeviceType::PrivateUse1, &the_pinned_memory());
  return true;
}();

}  // namespace

c10::DeviceAllocator* device_memory() { return &the_device_memory(); }
c10::Allocator* pinned_memory() { return &the_pinned_memory(); }

bool is_pinned(const void* pointer) {
  Guard guard;
  return the_pinned_memory().find(pointer) != nullptr;
}

void pin(const void* pointer) { the_pinned_memory().hold(pointer, 1); }
void unpin(const void* pointer) { the_pinned_memory().hold(pointer, -1); }

void resize_storage(const c10::Storage& storage, size_t bytes) {
  c10::DataPtr memory = the_device_memory().allocate(bytes);
  if (const size_t kept = std::min(bytes, storage.nbytes()); kept != 0)
    submit(current_stream(), [target = memory.get(), source = storage.data(), kept] { std::memcpy(target, source, kept); });
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(bytes);
}

}  // namespace late
