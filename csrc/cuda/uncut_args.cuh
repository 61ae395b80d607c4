#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/error.h"
#include "codec/grid.h"
#include "codec/nonfinite.h"
#include "codec/spec.h"
#include "cuda/grid.h"
#include "cuda/launch.cuh"
#include "cuda/tile.cuh"
#include "kernels/grid/grid_form.h"
#include "kernels/philox.h"

namespace lowcomm::cuda {

// A tensor of channels, its payload and the workspace, as kernels see them. Byte is std::byte, const where the payload
// is read.
//
// Scales stand in the workspace with a period that is a multiple of the channels and of 4, the channel of entry i being
// i mod channels: so four neighbouring elements' are one load, whatever the number of channels.
template <class Byte>
struct UncutArgs {
  Byte* meta;
  Byte* pad;  // zeros up to `words`
  Byte* words;
  uint64_t count;
  uint32_t pad_bytes, channels, period, bits;
  GridForm form;
  Nonfinite nonfinite;
  bool centred, three_codes;
  uint32_t* refused;

  uint32_t *low, *high, *odd;     // of a channel: see Spread
  float* sums;                    // of a channel
  float *base, *inverse, *magic;  // [period]; decoding, `inverse` is the step
  uint32_t* spare;                // [period]: what mends the channel's elements
};

inline uint32_t periodOf(uint32_t channels) {
  return channels % 4 == 0 ? channels : channels % 2 == 0 ? 2 * channels : 4 * channels;
}

template <class Byte>
size_t layOut(UncutArgs<Byte>& args, void* workspace) {
  Workspace parts(workspace);
  // One part, which is cleared as one; without memory none of them is anywhere.
  if (auto* spread = parts.take<uint32_t>(3 * uint64_t{args.channels})) {
    args.low = spread;
    args.high = spread + args.channels;
    args.odd = spread + 2 * uint64_t{args.channels};
  }
  args.sums = parts.take<float>(args.channels);
  args.base = parts.take<float>(args.period);
  args.inverse = parts.take<float>(args.period);
  args.magic = parts.take<float>(args.period);
  args.spare = parts.take<uint32_t>(args.period);
  return parts.bytes();
}

// The arguments of a call. Throws for a run that no call can take.
template <class Byte>
UncutArgs<Byte> uncutArgs(const char* doing, const GridRun& run, Byte* payload, uint32_t* refused) {
  const auto fail = [&](const char* what, const std::string& expected, const std::string& got) {
    return std::string(doing) + ": " + what + ": expected " + expected + ", got " + got;
  };
  const CodecSpec& codec = run.codec;
  const GridFamily* family = gridFamily(codec.id);
  checkRun(doing, codec, family != nullptr && !family->book, "a grid codec other than levels and gauss", run.dtype,
           payload);
  const bool channels = codec.axis == Axis::channel;
  if (channels ? codec.open() : codec.bucket != kTensorBucket) {
    throw ValueError(fail("codec", "axis=channel with C, or bucket=tensor", codec.str()));
  }
  constexpr uint64_t kLongest = uint64_t{1} << 31;
  if (channels && run.count % codec.bucket != 0) {
    throw ValueError(fail("elements", "a multiple of " + std::to_string(codec.bucket), std::to_string(run.count)));
  }
  if (!channels && run.count > kLongest) {
    throw ValueError(fail("elements", "at most " + std::to_string(kLongest), std::to_string(run.count)));
  }
  UncutArgs<Byte> args{};
  args.channels = channels ? codec.bucket : 1;
  args.period = periodOf(args.channels);
  const size_t meta = GridScales(codec).bytes(args.channels), words = up64(meta);
  args.meta = payload;
  if (payload != nullptr) {  // who asks for a workspace's bytes has none
    args.pad = payload + meta;
    args.words = payload + words;
  }
  args.count = run.count;
  args.pad_bytes = static_cast<uint32_t>(words - meta);
  args.bits = codec.bits;
  args.form = gridForm(codec);
  args.nonfinite = codec.nonfinite;
  args.centred = family->centred;
  args.three_codes = codec.id == CodecId::tern;
  args.refused = refused;
  return args;
}

template <class Byte>
UncutArgs<Byte> uncutArgs(const char* doing, const GridRun& run, Byte* payload, void* workspace, uint32_t* refused) {
  UncutArgs<Byte> args = uncutArgs(doing, run, payload, refused);
  expectAligned(doing, "workspace", workspace);
  layOut(args, workspace);
  return args;
}

// Enqueues the encode of a tensor that has elements (uncut_encode.cuh).
template <class T>
void encodeUncutRun(const Place& place, const UncutArgs<std::byte>& args, const T* x, GridRule rule,
                    const PhiloxKey& key);

// ---- what encode and decode share of a warp's way over the blocks of a tensor of channels ----

// Where the scales of a thread's rows stand, kept from block to block without a division: a warp's blocks are `stride`
// elements apart, rows 16. All places are multiples of 4, for blocks, rows and period are.
class Rows {
 public:
  __device__ Rows(uint64_t start, uint64_t stride, uint32_t period, const Seat& seat) : period_(period) {
    at_ = static_cast<uint32_t>((start + seat.element(0)) % period);
    hop_ = static_cast<uint32_t>(stride % period);
    row_ = kLanes % period;
  }

  // Of the first row's four elements; of those of the row after another.
  __device__ uint32_t first() const { return at_; }
  __device__ uint32_t below(uint32_t at) const { return wrapped(at + row_); }

  // Whether all rows have one row's scales.
  __device__ bool alike() const { return row_ == 0; }

  // To the warp's next block.
  __device__ void next() { at_ = wrapped(at_ + hop_); }

 private:
  __device__ uint32_t wrapped(uint32_t at) const { return at < period_ ? at : at - period_; }

  uint32_t period_, at_, hop_, row_;
};

// Four neighbours by one load.
template <class To>
__device__ inline void loadFour(To to[4], const To* from) {
  struct alignas(16) Whole {
    To at[4];
  };
  const Whole four = *reinterpret_cast<const Whole*>(from);
  for (uint32_t c = 0; c < 4; ++c)
    to[c] = four.at[c];
}

}  // namespace lowcomm::cuda
