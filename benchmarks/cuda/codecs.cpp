#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "codec/codec.h"
#include "codec/level_table.h"
#include "cuda/grid.h"
#include "elements.h"
#include "rows.h"

namespace lowcomm {

namespace {

LevelTable evenLevels(int bits) {
  std::vector<float> values(size_t{1} << bits);
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>(i) / static_cast<float>(values.size() - 1);
  return LevelTable(values);
}

// The kernels of a codec, for a run of so many elements.
struct Calls {
  std::function<void(void* payload, const void* x, uint32_t* refused)> encode;
  std::function<void(void* y, const void* payload, uint32_t* refused)> decode;
  std::function<void(float* acc, const void* payload, uint32_t* refused)> decode_add;
};

Calls callsOf(const CodecSpec& codec, DType dtype, uint64_t count, const LevelTable* levels) {
  const cuda::GridRun grid{codec, dtype, count, levels};
  return {[=](void* p, const void* x, uint32_t* r) { cuda::encodeGrid({}, grid, p, x, 0, {1, 2, 3}, r); },
          [=](void* y, const void* p, uint32_t* r) { cuda::decodeGrid({}, grid, y, p, r); },
          [=](float* acc, const void* p, uint32_t* r) { cuda::decodeAddGrid({}, grid, acc, p, r); }};
}

}  // namespace

void measureCodec(std::vector<Row>& rows, const std::string& text, DType dtype, const Options& options) {
  const CodecSpec spec = CodecSpec::parse(text);
  const std::optional<LevelTable> levels = needsTable(spec) ? std::optional(evenLevels(spec.bits)) : std::nullopt;
  std::shared_ptr<const Codec> codec = makeCodec(spec);
  if (levels) codec = codec->with(*levels);
  const size_t count = (options.mib << 20) / 4;
  const size_t raw = count * itemBytes(dtype), sent = codec->encodedBytes(count, dtype);
  const std::vector<std::byte> source = elements(count, dtype);
  std::vector<std::byte> expected(sent), values(raw);
  codec->encode(expected, source.data(), dtype, 0, count, {1, 2, 3});
  codec->decode(values.data(), dtype, expected, 0, count);

  const Calls calls = callsOf(codec->spec(), dtype, count, levels ? &*levels : nullptr);
  const Memory x(raw), payload(sent), refused(4);
  const Memory from(count * 8), to(count * 8);  // as much as any row moves
  auto* flag = static_cast<uint32_t*>(refused.get());
  must(cudaMemcpy(x.get(), source.data(), raw, cudaMemcpyDefault));
  const auto add = [&](const char* loop, Measurement measured, double bound, bool same) {
    rows.push_back({text, dtypeName(dtype), loop, measured, bound, same});
  };

  const Measurement encode =
      measure(raw + sent, options.repetitions, from, to, [&] { calls.encode(payload.get(), x.get(), flag); });
  add("encode", encode, isStochastic(codec->spec()) ? 70 : 80, onHost(payload, sent) == expected);
  const Measurement decode =
      measure(raw + sent, options.repetitions, from, to, [&] { calls.decode(x.get(), payload.get(), flag); });
  add("decode", decode, 80, onHost(x, raw) == values);

  // Into zeros: once for the sum to be that of one payload, then for the time.
  const Memory acc(count * 4);
  auto* sums = static_cast<float*>(acc.get());
  calls.decode_add(sums, payload.get(), flag);
  std::vector<float> sum(count);
  codec->decodeAdd(sum.data(), dtype, expected, 0, count);
  const bool same = onHost(acc, count * 4) == bytesOf(sum);
  const Measurement adding =
      measure(count * 8 + sent, options.repetitions, from, to, [&] { calls.decode_add(sums, payload.get(), flag); });
  add("decode-add", adding, 80, same && onHost(refused, 4) == std::vector<std::byte>(4));
}

}  // namespace lowcomm
