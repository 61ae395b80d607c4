#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace lowcomm::fake_device {

// A CUDA of two indices that does nothing but write down its orders (the CPU wheel has no guard of this type).
inline constexpr c10::DeviceType kType = c10::DeviceType::CUDA;
inline constexpr c10::DeviceIndex kDevices = 2;
inline constexpr c10::StreamId kPoolStream = 7;

// What a device would have been told, in order: "record e1 on 0:5", "block 0:7 on e1", "synchronize e1", "run on 0:7".
extern std::vector<std::string> told;
extern c10::DeviceIndex current;
extern std::array<c10::StreamId, kDevices> streams;  // of the caller, by device index

std::string named(const c10::Stream& stream);

// Forgets everything; the caller's streams are 0:5 and 1:6, events count from e1.
void reset();

}  // namespace lowcomm::fake_device
