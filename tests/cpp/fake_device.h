#pragma once

#include <ATen/ATen.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <array>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace lowcomm::fake_device {

// A CUDA of two indices that does nothing but write down its orders (the CPU wheel has no guard of this type). Its
// memory is the host's, its pinned memory too. What is enqueued is done at once, or, where the device is made late
// (late_streams.h), when somebody waits for it.
inline constexpr c10::DeviceType kType = c10::DeviceType::CUDA;
inline constexpr c10::DeviceIndex kDevices = 2;
inline constexpr int kNever = 0xa5;                    // each byte of memory that nothing was written to
inline constexpr c10::StreamId kPoolStream = 7;        // the first that the pool gives; the next are 8, 9 ...
inline constexpr c10::StreamId kFirstNewStream = 100;  // torch.Stream(): 100, 101 ... in the order of their making

// The orders that a device would have got: "record e1 on 0:5", "block 0:7 on e1", "synchronize e1", "run on 0:7",
// "copy to host on 0:7", "copy to device on 0:7", "cat on 0:7", "spread on 0:7" (a foreach copy). Of all threads: read
// it when they have ended or wait.
extern std::vector<std::string> told;
void tell(std::string order);

// Of the calling thread, as CUDA has them: 0 and the caller's streams where it has set nothing.
extern thread_local c10::DeviceIndex current;
extern thread_local std::array<c10::StreamId, kDevices> streams;

// The devices on which a context would have been opened: cudaSetDevice was called with them, by whatever thread.
std::set<c10::DeviceIndex> contexts();

extern bool capturing;  // every stream, for a graph

std::string named(const c10::Stream& stream);
c10::Stream streamOf(c10::DeviceIndex index);  // the calling thread's

// A contiguous tensor on the fake device that holds these elements.
at::Tensor onDevice(std::vector<float> elements, c10::DeviceIndex index = 0);

// The elements of a tensor of the fake device.
std::vector<float> elementsOf(const at::Tensor& tensor);

// Forgets everything; the caller's streams are 0:5 and 1:6, events count from e1.
void reset();

}  // namespace lowcomm::fake_device
