#include "cuda/grid.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "codec/codec.h"
#include "codec/topk.h"
#include "elements.h"
#include "rows.h"

namespace lowcomm {

void measureUncut(std::vector<Row>& rows, const std::string& text, const Options& options) {
  const auto codec = makeCodec(CodecSpec::parse(text));
  const CodecSpec& spec = codec->spec();
  const size_t count = (options.mib << 20) / 4, raw = count * 4, sent = codec->encodedBytes(count, DType::float32);
  const cuda::GridRun run{spec, DType::float32, count};
  const bool topk = spec.id == CodecId::topk, sums = spec.range == Range::l2 || spec.id == CodecId::sign1;
  const size_t reads = topk ? 5 : sums ? 3 : 2, selected = topk ? topkParts(spec, count).k * 8 : 0;
  const Memory x(raw), acc(raw), payload(sent), refused(4), from(raw * 3), to(raw * 3);
  const Memory workspace(topk ? cuda::topkWorkspaceBytes(run) : cuda::uncutWorkspaceBytes(run));
  auto* flag = static_cast<uint32_t*>(refused.get());
  auto* sum = static_cast<float*>(acc.get());
  const std::vector<std::byte> source = elements(count, DType::float32);
  must(cudaMemcpy(x.get(), source.data(), raw, cudaMemcpyDefault));
  std::vector<std::byte> expected(sent), values(raw);
  codec->encode(expected, source.data(), DType::float32, 0, count, {1, 2, 3});
  codec->decode(values.data(), DType::float32, expected, 0, count);
  const auto measureRow = [&](const char* loop, size_t bytes, double bound, const Memory& result,
                              const std::vector<std::byte>& same, const std::function<void()>& enqueue) {
    enqueue();  // once for what comes of it, decode-add into zeros
    const bool equal = onHost(result, same.size()) == same && onHost(refused, 4) == std::vector<std::byte>(4);
    rows.push_back({text, "float32", loop, measure(bytes, options.repetitions, from, to, enqueue), bound, equal});
  };

  const bool stochastic = !topk && gridFamily(spec.id)->rounding == Rounding::stochastic;
  const double bound = topk ? 0 : 80;
  measureRow("encode", raw * reads + sent + selected,
             sums && spec.axis == Axis::flat ? 0
             : stochastic                    ? 70
                                             : bound,
             payload, expected, [&] {
               const PhiloxKey key{1, 2, 3};
               topk ? cuda::encodeTopk({}, run, payload.get(), x.get(), key, workspace.get(), flag)
                    : cuda::encodeUncut({}, run, payload.get(), x.get(), key, workspace.get(), flag);
             });
  // Adding to 0 gives the decoded elements, except for the sign of a zero, which these elements do not have.
  measureRow("decode-add", (topk ? 2 * selected : 2 * raw) + sent, bound, acc, values, [&] {
    topk ? cuda::decodeAddTopk({}, run, sum, payload.get(), workspace.get(), flag)
         : cuda::decodeAddUncut({}, run, sum, payload.get(), workspace.get(), flag);
  });
  measureRow("decode", raw + sent + selected, bound, x, values, [&] {
    topk ? cuda::decodeTopk({}, run, x.get(), payload.get(), workspace.get(), flag)
         : cuda::decodeUncut({}, run, x.get(), payload.get(), workspace.get(), flag);
  });
}

}  // namespace lowcomm
