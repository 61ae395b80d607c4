#include "codec/fused.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuda/grid.h"
#include "elements.h"
#include "rows.h"

namespace lowcomm {

void measureFused(std::vector<Row>& rows, const std::string& text, const Options& options) {
  const std::shared_ptr<const Codec> codec = makeCodec(CodecSpec::parse(text));
  FusedCodec fused(codec);
  const size_t count = (options.mib << 20) / 4, raw = count * 4, sent = codec->encodedBytes(count, DType::float32);
  const std::vector<std::byte> source = elements(count, DType::float32);
  const Draws draws{1, 2, 3};
  const PhiloxKey key{1, 2, 3};
  const cuda::GridRun run{codec->spec(), DType::float32, count};

  const Memory x(raw), payload(sent), state(raw), refused(4), from(raw * 2), to(raw * 2);
  auto* flag = static_cast<uint32_t*>(refused.get());
  must(cudaMemcpy(x.get(), source.data(), raw, cudaMemcpyDefault));
  const double bound = isStochastic(codec->spec()) ? 70 : 80;
  const auto measureRow = [&](const char* loop, size_t bytes, const Memory& result,
                              const std::vector<std::byte>& expected_payload, const std::vector<float>& expected,
                              const std::function<void()>& enqueue) {
    enqueue();
    const bool same = onHost(payload, sent) == expected_payload && onHost(result, raw) == bytesOf(expected) &&
                      onHost(refused, 4) == std::vector<std::byte>(4);
    rows.push_back({text, "float32", loop, measure(bytes, options.repetitions, from, to, enqueue), bound, same});
  };

  std::vector<std::byte> expected(sent);
  const cuda::FusedState kept{state.get(), state.get(), DType::float32};
  for (const bool delta : {true, false}) {
    std::vector<float> after(count);
    const auto host = delta ? &FusedCodec::encodeDelta : &FusedCodec::encodeFeedback;
    (fused.*host)(expected, {source.data(), DType::float32}, {after.data(), DType::float32}, 0, count, draws);
    must(cudaMemset(state.get(), 0, raw));
    const auto there = delta ? cuda::encodeDelta : cuda::encodeFeedback;
    measureRow(delta ? "delta" : "feedback", 3 * raw + sent, state, expected, after,
               [&] { there({}, run, payload.get(), x.get(), kept, 0, key, flag); });
  }

  const Memory peer(sent);
  must(cudaMemcpy(peer.get(), expected.data(), sent, cudaMemcpyDefault));
  std::vector<cuda::FusedTerm> terms(4, cuda::FusedTerm{peer.get()});
  std::vector<Contribution> same_terms(4, Contribution{expected, nullptr});
  terms[1] = {nullptr, x.get()};
  same_terms[1] = {{}, source.data()};
  std::vector<std::byte> total(sent);
  std::vector<float> out(count);
  fused.encodeSum(total, out.data(), DType::float32, same_terms, 4, 0, count, draws);
  measureRow("sum of 4", 2 * raw + 4 * sent, state, total, out,
             [&] { cuda::encodeSum({}, run, payload.get(), state.get(), terms, 4, 0, key, flag); });
}

}  // namespace lowcomm
