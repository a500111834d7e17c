// What torch asks of a device type: streams and events through the guard, and the hooks of an accelerator.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"
#include "timeline.h"

namespace late {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

const Device LATE(DeviceType::PrivateUse1, 0);

Stream stream_of(int64_t id) { return Stream(Stream::UNSAFE, LATE, id); }

struct Event {
  MarkPtr mark;
};

const Event& event_of(void* event) { return *static_cast<Event*>(event); }

struct LateGuard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::PrivateUse1; }
  Device exchangeDevice(Device) const override { return LATE; }
  Device getDevice() const override { return LATE; }
  void setDevice(Device device) const override { TORCH_CHECK(device.index() <= 0, "there is one late device, got ", device); }
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }

  Stream getStream(Device) const override { return stream_of(current_stream()); }
  Stream getDefaultStream(Device) const override { return stream_of(0); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return stream_of(new_stream()); }
  Stream getNewStream(Device, int) const override { return stream_of(new_stream()); }
  Stream exchangeStream(Stream stream) const override { return stream_of(exchange_stream(stream.id())); }
  bool queryStream(const Stream& stream) const override { return query_stream(stream.id()); }
  void synchronizeStream(const Stream& stream) const override { force_stream(stream.id()); }
  void synchronizeDevice(const DeviceIndex) const override { force_all(); }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    static_cast<Event*>(*event)->mark = late::record(stream.id());
  }
  void block(void* event, const Stream& stream) const override {
    if (event != nullptr) late::block(stream.id(), event_of(event).mark);
  }
  bool queryEvent(void* event) const override { return event == nullptr || query(event_of(event).mark); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) force(event_of(event).mark);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    return 1e3 * (event_of(to).mark->seconds - event_of(from).mark->seconds);
  }

  void recordDataPtrOnStream(const c10::DataPtr& pointer, const Stream& stream) const override {
    device_memory()->recordStream(pointer, stream);
  }
};

struct LateHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  Device getDeviceFromPtr(void*) const override { return LATE; }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_memory(); }
  // The device draws from the generator of the CPU, so that a program draws the same numbers on both.
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { resize_storage(storage, bytes); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, LateGuard)

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new LateHooks);
  return true;
}();

}  // namespace
}  // namespace late
