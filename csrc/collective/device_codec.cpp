#include "collective/device_codec.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace lowcomm {
namespace {

constexpr size_t kWord = sizeof(uint32_t);
constexpr size_t kAlignment = 64;

}  // namespace

DeviceCodec::DeviceCodec(std::unique_ptr<CodecQueue> queue, std::unique_ptr<CodecKernels> kernels, size_t slot_bytes)
    : queue_(std::move(queue)), kernels_(std::move(kernels)), slot_bytes_(slot_bytes) {}

// Pinned memory must not go while a copy of it is under way, and an op that failed has waited for nothing.
DeviceCodec::~DeviceCodec() {
  try {
    queue_->mark()();
  } catch (...) {  // the device has failed; whoever used it was told
  }
}

DeviceCodec::SlotPtr DeviceCodec::take(size_t bytes) {
  const auto fits = [&](const auto& slot) { return slot->capacity_ >= bytes; };
  // The one that was given back first: its copies are the likeliest to have passed.
  auto found = std::find_if(idle_.begin(), idle_.end(), fits);
  std::unique_ptr<Slot> slot;
  if (found != idle_.end()) {
    slot = std::move(*found);
    idle_.erase(found);
  } else {
    slot = std::make_unique<Slot>();
    slot->capacity_ = std::max(bytes, slot_bytes_);
    slot->pinned_ = queue_->pinnedMemory(slot->capacity_ + kAlignment);
    slot->device_ = queue_->deviceMemory(slot->capacity_ + kAlignment);
  }
  wait(*slot);
  slot->bytes_ = bytes;
  return SlotPtr(slot.release(), Return{this});
}

void* DeviceCodec::workspace(const Run& run, DType dtype) {
  const size_t bytes = kernels_->workspaceBytes(run, dtype);
  if (bytes > workspace_bytes_) {
    workspace_ = queue_->deviceMemory(bytes);
    workspace_bytes_ = bytes;
  }
  return workspace_.get();
}

void DeviceCodec::clear(Slot& slot) {
  kernels_->clear(slot.word(), kWord);
}

void DeviceCodec::fetch(Slot& slot) {
  kernels_->copy(slot.host(), slot.device(), slot.bytes() + kWord);
  to_host_ += slot.bytes();
  slot.landing_ = queue_->mark();
}

void DeviceCodec::report(Slot& slot) {
  kernels_->copy(slot.host() + slot.bytes(), slot.word(), kWord);
  slot.landing_ = queue_->mark();
}

void DeviceCodec::load(Slot& slot) {
  std::memset(slot.host() + slot.bytes(), 0, kWord);
  kernels_->copy(slot.device(), slot.host(), slot.bytes() + kWord);
  to_device_ += slot.bytes();
  slot.landing_ = queue_->mark();
}

void DeviceCodec::wait(Slot& slot) {
  if (slot.landing_) slot.landing_();
  slot.landing_ = nullptr;
}

bool DeviceCodec::refused(Slot& slot) {
  wait(slot);
  uint32_t word = 0;
  std::memcpy(&word, slot.host() + slot.bytes(), kWord);
  return word != 0;
}

std::vector<std::byte> DeviceCodec::toHost(const void* elements, size_t bytes) {
  if (bytes == 0) return {};
  const CodecQueue::Memory pinned = queue_->pinnedMemory(bytes);
  kernels_->copy(pinned.get(), elements, bytes);
  queue_->mark()();
  to_host_ += bytes;
  return {pinned.get(), pinned.get() + bytes};
}

void DeviceCodec::toDevice(void* elements, std::span<const std::byte> from) {
  if (from.empty()) return;
  const CodecQueue::Memory pinned = queue_->pinnedMemory(from.size());
  std::memcpy(pinned.get(), from.data(), from.size());
  kernels_->copy(elements, pinned.get(), from.size());
  queue_->mark()();
  to_device_ += from.size();
}

}  // namespace lowcomm
