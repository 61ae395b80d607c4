// Every codec's decoder. Input: a byte L, L bytes of codec text, a byte for the element type, two bytes for the number
// of elements, then the payload; it is cut or filled up with zeros to the size that the codec expects, except for
// inputs whose element type has its upper bit set.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "codec/codec.h"
#include "target.h"

namespace {

// The bits of what decode gave and of what decodeAdd gave, for NaN equals NaN here. -0 + 0 is 0.
bool sameBits(float a, float b) {
  a += 0.0f;
  return std::memcmp(&a, &b, sizeof(a)) == 0 || (a != a && b != b);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lowcomm;
  if (size < 1 || size < size_t{data[0]} + 4) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data + 1), data[0]);
  const uint8_t* rest = data + 1 + data[0];
  const size_t payload_bytes = size - (size_t{data[0]} + 4);
  const auto dtype = static_cast<DType>(rest[0] & 0x7f);
  const uint64_t count = rest[1] | uint64_t{rest[2]} << 8;
  try {
    auto codec = makeCodec(CodecSpec::parse(text));
    if (needsTable(codec->spec())) codec = codec->with(fuzz::evenTable(codec->spec().bits));
    if (itemBytes(dtype) == 0 || !codec->supports(dtype)) return 0;
    const bool fitted = (rest[0] & 0x80) == 0;
    std::vector<std::byte> payload(fitted ? codec->encodedBytes(count, dtype) : payload_bytes);
    std::copy_n(reinterpret_cast<const std::byte*>(rest) + 3, std::min(payload.size(), payload_bytes), payload.begin());
    std::vector<std::byte> decoded(count * itemBytes(dtype));
    codec->decode(decoded.data(), dtype, payload, 0, count);
    if (count == 0 || dtype != DType::float32 || codec->spec().id == CodecId::none) return 0;
    std::vector<float> sum(count), values(count);
    std::memcpy(values.data(), decoded.data(), decoded.size());
    codec->decodeAdd(sum.data(), dtype, payload, 0, count);
    fuzz::require(std::equal(values.begin(), values.end(), sum.begin(), sameBits));
  } catch (const ValueError&) {  // the codec's text
  } catch (const TypeError&) {
  } catch (const WireError&) {
  }
  return 0;
}
