#include "codec/float_codec.h"

#include <cstring>

#include "base/error.h"
#include "base/float_env.h"
#include "codec/nonfinite.h"
#include "codec/payload.h"
#include "kernels/finite.h"

namespace lowcomm {

FloatCodec::FloatCodec(const CodecSpec& spec, const KernelTable& table)
    : Codec(spec), table_(table), name_(spec.str()) {}

void FloatCodec::checkRun(DType dtype, uint64_t first) const {
  if (!supports(dtype)) {
    throw TypeError(name_ + ": expected float32, float16 or bfloat16, got " + dtypeName(dtype));
  }
  if (first % granularity() != 0) {
    throw ValueError(
        name_ + ": first element: expected " +
        (granularity() == kUncut ? "0, a whole tensor" : "a multiple of " + std::to_string(granularity())) + ", got " +
        std::to_string(first));
  }
}

bool FloatCodec::begin(std::span<std::byte> dst, DType dtype, uint64_t first, uint64_t count) const {
  checkRun(dtype, first);
  expectBytes<ValueError>(name_, encodedBytes(count, dtype), dst.size());
  return count > 0;
}

void FloatCodec::encode(std::span<std::byte> dst, const void* src, DType dtype, uint64_t first, uint64_t count,
                        const Draws& draws) const {
  if (!begin(dst, dtype, first, count)) return;
  const PhiloxKey key{draws.seed, draws.stream, draws.step};
  if (encodeTaken(dst, src, dtype, first, count, key)) return;
  expectTaken(src, dtype, first, count, "");
  if (spec().nonfinite != Nonfinite::error && encodeRepaired(dst, src, dtype, first, count, key)) return;
  if (spec().delta != 0) {
    const bool channels = spec().axis == Axis::channel;
    const float span = static_cast<float>((1 << spec().bits) - 1) * spec().delta;
    throw ValueError(
        name_ + ": expected " + (channels ? "channels" : "buckets") +
        " whose largest and smallest element are at most " + std::to_string(span) +
        " apart, (2^bits - 1) * delta, got one with more" +
        (channels ? "" : " in elements " + std::to_string(first) + "..." + std::to_string(first + count - 1)));
  }
  throw ValueError(name_ + ": expected elements that stay as they are until the op is done, got some that changed");
}

// Rare, so it is a pass of its own over a copy, and the loops know nothing of it.
bool FloatCodec::encodeRepaired(std::span<std::byte> dst, const void* src, DType dtype, uint64_t first, uint64_t count,
                                const PhiloxKey& key) const {
  const size_t bytes = count * itemBytes(dtype);
  const auto copy = std::make_unique_for_overwrite<std::byte[]>(bytes);
  std::memcpy(copy.get(), src, bytes);
  std::vector<uint64_t> poisoned;
  if (spec().nonfinite == Nonfinite::saturate) {
    repair(copy.get(), dtype, count);
  } else {
    poisoned = blankRefused(copy.get(), dtype, count);
  }
  if (!encodeTaken(dst, copy.get(), dtype, first, count, key)) return false;
  for (uint64_t number : poisoned)
    poison(dst, count, number);
  return true;
}

void FloatCodec::decode(void* dst, DType dtype, std::span<const std::byte> src, uint64_t first, uint64_t count) const {
  checkRun(dtype, first);
  checkPayload(src, count);
  if (count == 0) return;
  FloatEnv env;
  decodeTo(dst, dtype, src, count);
}

void FloatCodec::decodeAdd(float* acc, DType dtype, std::span<const std::byte> src, uint64_t first,
                           uint64_t count) const {
  checkRun(dtype, first);
  checkPayload(src, count);
  if (count == 0) return;
  FloatEnv env;
  addTo(acc, src, count);
}

void FloatCodec::expectTaken(const void* src, DType dtype, uint64_t first, uint64_t count,
                             const std::string& of) const {
  if (spec().nonfinite == Nonfinite::error) expectFinite(spec(), src, dtype, first, count, of);
}

bool FloatCodec::needsRepair(const void* src, DType dtype, uint64_t count) const {
  return spec().nonfinite == Nonfinite::saturate && firstNonFinite(src, dtype, count, finiteLimit(spec())) >= 0;
}

const float* FloatCodec::floats(const void* src, DType dtype, uint64_t count, std::unique_ptr<float[]>& memory) const {
  if (dtype == DType::float32) return static_cast<const float*>(src);
  memory = std::make_unique_for_overwrite<float[]>(count);
  widening(dtype)(memory.get(), static_cast<const uint16_t*>(src), count);
  return memory.get();
}

}  // namespace lowcomm
