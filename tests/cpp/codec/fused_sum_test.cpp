// Sums that are encoded again are the bits of what they fuse.
#include "codec/fused.h"

#include <gtest/gtest.h>

#include <cstring>

#include "base/float_env.h"
#include "fused_cases.h"

namespace lowcomm {
namespace {

using namespace test;

struct SumCase {
  std::vector<Bytes> payloads;
  std::vector<Contribution> contributions;
};

SumCase contributions(const Codec& codec, int ranks, int own, const Tensor& x, uint64_t first) {
  SumCase c;
  const size_t n = x.bytes.size() / itemBytes(x.dtype);
  for (int rank = 0; rank < ranks; ++rank)
    c.payloads.push_back(test::encoded(codec, normal(n, static_cast<uint32_t>(rank)), kDraws, first));
  for (int rank = 0; rank < ranks; ++rank)
    c.contributions.push_back({c.payloads[static_cast<size_t>(rank)], rank == own ? x.bytes.data() : nullptr});
  return c;
}

TEST(Fused, SumsAreWhatTheyFuse) {
  for (const std::string text : kTexts) {
    FusedCodec fused(codecOf(text)), whole(std::make_shared<Opaque>(codecOf(text)));
    const Codec& codec = fused.codec();
    for (size_t n : {size_t{0}, size_t{1}, size_t{17}, size_t{513}, size_t{1024}, size_t{1025}, size_t{9001}}) {
      for (int ranks : {1, 2, 5}) {
        for (int own : {-1, 0, ranks - 1}) {
          const uint64_t first = codec.granularity() == Codec::kUncut ? 0 : 2 * codec.granularity();
          const DType dtype = kTypes[(n + static_cast<size_t>(ranks)) % 3];
          const int divisor = own == 0 ? 0 : ranks;
          SCOPED_TRACE(text + " " + std::to_string(n) + " ranks " + std::to_string(ranks) + " own " +
                       std::to_string(own) + " " + dtypeName(dtype));
          const Tensor x(normal(n, 99), dtype);
          const SumCase c = contributions(codec, ranks, own, x, first);
          std::vector<float> sum(n, 0.0f);
          for (int rank = 0; rank < ranks; ++rank) {
            const std::vector<float> values =
                rank == own ? x.floats() : test::decoded(codec, c.payloads[static_cast<size_t>(rank)], n, first);
            for (size_t i = 0; i < n; ++i)
              sum[i] = rank == 0 ? values[i] : sum[i] + values[i];
          }
          for (float& v : sum)
            v = divisor > 0 ? v / static_cast<float>(divisor) : v;
          const Bytes payload = test::encoded(codec, sum, kDraws, first);
          const Bytes value = Tensor(test::decoded(codec, payload, n, first), dtype).bytes;
          for (FusedCodec* f : {&fused, &whole}) {
            Bytes dst(payload.size(), std::byte{0xff}), out(value.size());
            f->encodeSum(dst, out.data(), dtype, c.contributions, divisor, first, n, kDraws);
            ASSERT_EQ(dst, payload);
            ASSERT_EQ(out, value);
          }
        }
      }
    }
  }
}

TEST(Fused, SumsIntoTheOwnElements) {
  FusedCodec fused(codecOf("minmax4:bucket=512"));
  Tensor x(normal(5000, 9), DType::bfloat16);
  const SumCase c = contributions(fused.codec(), 3, 1, x, 0);
  Bytes dst(c.payloads[0].size()), again(dst.size()), out(x.bytes.size());
  fused.encodeSum(dst, out.data(), x.dtype, c.contributions, 3, 0, 5000, kDraws);
  fused.encodeSum(again, x.bytes.data(), x.dtype, c.contributions, 3, 0, 5000, kDraws);
  EXPECT_EQ(again, dst);
  EXPECT_EQ(x.bytes, out);
}

std::string refusal(FusedCodec& fused, const std::vector<Contribution>& contributions, size_t n) {
  Bytes dst(fused.codec().encodedBytes(n, DType::float32)), out(4 * n);
  return test::thrownBy<WireError>(
      [&] { fused.encodeSum(dst, out.data(), DType::float32, contributions, 0, 0, n, kDraws); });
}

// As the codec says it of the whole payload.
TEST(Fused, PayloadsThatAreNone) {
  FusedCodec fused(codecOf("minmax4:bucket=512"));
  const Codec& codec = fused.codec();
  constexpr size_t kCount = 5000;
  const Bytes good = test::encoded(codec, normal(kCount, 1), kDraws);
  const auto wholeSays = [&](const Bytes& payload) {
    return test::thrownBy<WireError>([&] { test::decoded(codec, payload, kCount); });
  };
  std::vector<Bytes> bad(4, good);
  bad[0].pop_back();
  bad[1][83] = std::byte{1};  // of the padding after ten buckets
  const uint32_t infinity = 0x7f800000u;
  std::memcpy(bad[2].data() + 8 * 7 + 4, &infinity, 4);  // the step of bucket 7
  bad[3].back() = std::byte{0x10};                       // a code of no element
  for (const Bytes& payload : bad) {
    EXPECT_NE(wholeSays(payload), test::kNothing);
    EXPECT_EQ(refusal(fused, {{payload}}, kCount), wholeSays(payload));
    EXPECT_EQ(refusal(fused, {{good}, {payload}}, kCount), wholeSays(payload));
  }
}

TEST(Fused, SumsOfNothing) {
  FusedCodec fused(codecOf("minmax4:bucket=512"));
  Tensor x(normal(512, 1), DType::float32);
  Bytes dst(fused.codec().encodedBytes(512, DType::float32));
  EXPECT_THROW(fused.encodeSum(dst, x.bytes.data(), DType::float32, {}, 0, 0, 512, {}), ValueError);
}

#if defined(__x86_64__)
TEST(Fused, SumsIgnoreTheControlRegister) {
  FusedCodec fused(codecOf("minmax4:bucket=512"));
  const Tensor x(normal(3000, 1, 1e-38f), DType::float32);
  const SumCase c = contributions(fused.codec(), 3, 1, x, 0);
  Bytes dst(c.payloads[0].size()), out(x.bytes.size()), dst2(dst), out2(out);
  fused.encodeSum(dst, out.data(), x.dtype, c.contributions, 3, 0, 3000, kDraws);
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(0x1f80 | 0x8040 | 0x6000);  // flush to zero, denormals are zero, round toward zero
  fused.encodeSum(dst2, out2.data(), x.dtype, c.contributions, 3, 0, 3000, kDraws);
  _mm_setcsr(saved);
  EXPECT_EQ(dst2, dst);
  EXPECT_EQ(out2, out);
}
#endif

}  // namespace
}  // namespace lowcomm
