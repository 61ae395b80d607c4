// Deltas and error feedback in one call are the bits of what they fuse.
#include "codec/fused.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "base/float_env.h"
#include "fused_cases.h"

namespace lowcomm {
namespace {

using namespace test;

struct Outcome {
  Bytes payload, state;
  bool operator==(const Outcome&) const = default;
};

Outcome deltaByHand(const Codec& codec, const Tensor& x, Tensor m, uint64_t first) {
  std::vector<float> difference = x.floats(), before = m.floats();
  for (size_t i = 0; i < difference.size(); ++i)
    difference[i] -= before[i];
  const Bytes payload = test::encoded(codec, difference, kDraws, first);
  std::vector<float> after = before;
  codec.decodeAdd(after.data(), DType::float32, payload, first, after.size());
  for (size_t i = 0; i < after.size(); ++i)
    after[i] = std::isfinite(after[i]) ? after[i] : before[i];
  return {payload, Tensor(after, m.dtype).bytes};
}

Outcome feedbackByHand(const Codec& codec, const Tensor& g, Tensor e, uint64_t first) {
  std::vector<float> y = g.floats();
  const std::vector<float> before = e.floats();
  for (size_t i = 0; i < y.size(); ++i)
    y[i] += before[i];
  const Bytes payload = test::encoded(codec, y, kDraws, first);
  const std::vector<float> decoded = test::decoded(codec, payload, y.size(), first);
  for (size_t i = 0; i < y.size(); ++i)
    y[i] = std::isfinite(y[i] - decoded[i]) ? y[i] - decoded[i] : 0;
  return {payload, Tensor(y, e.dtype).bytes};
}

Outcome delta(FusedCodec& fused, const Tensor& x, Tensor m, uint64_t first, size_t n) {
  Bytes payload(fused.codec().encodedBytes(n, DType::float32), std::byte{0xff});
  fused.encodeDelta(payload, x.elements(), m.state(), first, n, kDraws);
  return {payload, m.bytes};
}

Outcome feedback(FusedCodec& fused, const Tensor& g, Tensor e, uint64_t first, size_t n) {
  Bytes payload(fused.codec().encodedBytes(n, DType::float32), std::byte{0xff});
  fused.encodeFeedback(payload, g.elements(), e.state(), first, n, kDraws);
  return {payload, e.bytes};
}

TEST(Fused, ABadStepIsForgotten) {
  constexpr size_t kCount = 300, kBad = 70;
  for (const char* text : {"minmax4:bucket=64,nonfinite=poison", "logbyte"}) {
    for (float bad : {INFINITY, NAN}) {
      SCOPED_TRACE(std::string(text) + " " + std::to_string(bad));
      FusedCodec fused(codecOf(text));
      std::vector<float> memory(kCount, 0.5f), residual(kCount, 0.25f);
      for (int step = 0; step < 3; ++step) {
        std::vector<float> x = normal(kCount, 3);
        if (step == 0) x[kBad] = bad;
        const Tensor source(x, DType::float32);
        Bytes payload(fused.codec().encodedBytes(kCount, DType::float32));
        fused.encodeDelta(payload, source.elements(), {memory.data(), DType::float32}, 0, kCount, kDraws);
        fused.encodeFeedback(payload, source.elements(), {residual.data(), DType::float32}, 0, kCount, kDraws);
        for (size_t i = 0; i < kCount; ++i) {
          ASSERT_LT(std::abs(memory[i]), 10) << step << " " << i;
          ASSERT_LT(std::abs(residual[i]), 10) << step << " " << i;
        }
      }
    }
  }
}

TEST(Fused, DeltaAndFeedbackAreWhatTheyFuse) {
  for (const std::string text : kTexts) {
    FusedCodec fused(codecOf(text)), whole(std::make_shared<Opaque>(codecOf(text)));
    const Codec& codec = fused.codec();
    const size_t bucket = codec.spec().bucket ? codec.spec().bucket : 512;
    std::vector<size_t> sizes = test::edgeSizes(bucket);
    sizes.insert(sizes.end(), {1023, 1024, 1025, 2048, 5000, 3 * 4096 + 17});
    for (size_t n : sizes) {
      for (uint64_t first : {uint64_t{0}, 3 * codec.granularity(), uint64_t{1} << 37}) {
        if (codec.granularity() == Codec::kUncut && first != 0) continue;
        const size_t turn = n + first % 7;
        const Tensor x(normal(n, 1), kTypes[turn % 3]), state(normal(n, 2, 0.3f), kTypes[turn / 3 % 3]);
        SCOPED_TRACE(text + " " + std::to_string(n) + " from " + std::to_string(first) + " " + dtypeName(x.dtype) +
                     " " + dtypeName(state.dtype));
        const Outcome changed = deltaByHand(codec, x, state, first), fed = feedbackByHand(codec, x, state, first);
        ASSERT_EQ(delta(fused, x, state, first, n), changed);
        ASSERT_EQ(feedback(fused, x, state, first, n), fed);
        ASSERT_EQ(delta(whole, x, state, first, n), changed);
        ASSERT_EQ(feedback(whole, x, state, first, n), fed);
      }
    }
  }
}

// The values sent and the values left add up to the original ones.
TEST(Fused, FeedbackLosesNothing) {
  FusedCodec fused(codecOf("sym4:bucket=1024"));
  constexpr size_t kCount = 9000;
  Tensor e(std::vector<float>(kCount, 0.0f), DType::float32);
  std::vector<float> sent(kCount, 0.0f), given(kCount, 0.0f);
  Bytes payload(fused.codec().encodedBytes(kCount, DType::float32));
  for (uint32_t step = 0; step < 20; ++step) {
    const std::vector<float> values = normal(kCount, step);
    const Tensor g(values, DType::float32);
    fused.encodeFeedback(payload, g.elements(), e.state(), 0, kCount, kDraws);
    fused.codec().decodeAdd(sent.data(), DType::float32, payload, 0, kCount);
    for (size_t i = 0; i < kCount; ++i)
      given[i] += values[i];
  }
  const std::vector<float> rest = e.floats();
  for (size_t i = 0; i < kCount; ++i)
    ASSERT_NEAR(sent[i] + rest[i], given[i], 2e-4) << i;
}

// A delta's in place is without meaning then: it leaves what it was given to read.
TEST(Fused, AFailedCallLeavesTheState) {
  for (const char* text :
       {"minmax4:bucket=512", "sym4:bucket=64", "qsgd4:bucket=64", "minmax4:bucket=4096", "gauss4"}) {
    FusedCodec fused(codecOf(text));
    for (size_t at : {0, 1023, 1024, 4000, 4999}) {
      for (DType dtype : kTypes) {
        for (float bad : {NAN, -INFINITY}) {
          Tensor x(normal(5000, 1, 0.5f), dtype);
          x.set(at, bad);
          Tensor state(normal(5000, 2, 0.3f), dtype), apart = state, scratch = state;
          const Bytes before = state.bytes;
          Bytes payload(fused.codec().encodedBytes(5000, DType::float32));
          enum Call { kApart, kInPlace, kFeedback };
          const auto run = [&](Call call) {
            if (call == kFeedback) {
              return fused.encodeFeedback(payload, x.elements(), state.state(), 1 << 20, 5000, kDraws);
            }
            Tensor& after = call == kApart ? apart : scratch;
            fused.encodeDelta(payload, x.elements(), call == kApart ? state.elements() : scratch.elements(),
                              after.state(), 1 << 20, 5000, kDraws);
          };
          for (Call call : {kApart, kInPlace, kFeedback}) {
            std::string what;
            EXPECT_EQ(test::refusedElement([&] { run(call); }, &what), (1 << 20) + at) << text;
            EXPECT_EQ(what.find("got -inf") != std::string::npos, !std::isnan(bad)) << what;
            EXPECT_EQ(state.bytes, before) << text << " " << at;
          }
        }
      }
    }
  }
}

// A value beyond a 16-bit type is held to the type's largest number, or no later step would get past it.
TEST(Fused, AStateOfANarrowTypeStaysFinite) {
  for (const char* text : {"minmax8:bucket=64", "sym8:bucket=64,nonfinite=poison"}) {
    for (DType dtype : {DType::float16, DType::bfloat16}) {
      FusedCodec fused(codecOf(text));
      const float large = dtype == DType::float16 ? 70000.0f : 0x1.ffp125f;
      std::vector<float> x = normal(64, 1);
      x[0] = large;
      const Tensor source(x, DType::float32);
      Tensor memory(std::vector<float>(64, 0.0f), dtype), residual = memory;
      Bytes payload(fused.codec().encodedBytes(64, DType::float32));
      for (int step = 0; step < 3; ++step) {
        fused.encodeDelta(payload, source.elements(), memory.state(), 0, 64, kDraws);
        fused.encodeFeedback(payload, source.elements(), residual.state(), 0, 64, kDraws);
        EXPECT_TRUE(std::isfinite(memory.floats()[0])) << text << " " << dtypeName(dtype);
        EXPECT_TRUE(std::isfinite(residual.floats()[0])) << text << " " << dtypeName(dtype);
      }
      if (dtype == DType::float16) EXPECT_EQ(memory.floats()[0], 65504) << text;
    }
  }
}

TEST(Fused, NonFiniteElementsThatPoison) {
  for (const char* text : {"minmax4:bucket=64,nonfinite=poison", "sym4:bucket=512,nonfinite=poison"}) {
    FusedCodec fused(codecOf(text));
    std::vector<float> values = normal(3000, 1);
    values[1500] = INFINITY;
    const Tensor x(values, DType::float32), state(normal(3000, 2), DType::float32);
    EXPECT_EQ(delta(fused, x, state, 0, 3000), deltaByHand(fused.codec(), x, state, 0)) << text;
    EXPECT_EQ(feedback(fused, x, state, 0, 3000), feedbackByHand(fused.codec(), x, state, 0)) << text;
  }
}

TEST(Fused, CallersMistakes) {
  EXPECT_THROW(FusedCodec(codecOf("none")), TypeError);
  FusedCodec fused(codecOf("minmax4:bucket=512"));
  Tensor x(normal(512, 1), DType::float32), m = x;
  Bytes dst(fused.codec().encodedBytes(512, DType::float32)), shorter(dst.size() - 1);
  EXPECT_THROW(fused.encodeDelta(dst, {x.bytes.data(), DType::int32}, m.state(), 0, 512, {}), TypeError);
  EXPECT_THROW(fused.encodeFeedback(dst, x.elements(), {m.bytes.data(), DType::float64}, 0, 512, {}), TypeError);
  EXPECT_THROW(fused.encodeDelta(shorter, x.elements(), m.state(), 0, 512, {}), ValueError);
  EXPECT_THROW(fused.encodeDelta(dst, x.elements(), m.state(), 100, 512, {}), ValueError);
  EXPECT_EQ(m.bytes, x.bytes);
}

#if defined(__x86_64__)
TEST(Fused, TheControlRegisterIsIgnored) {
  FusedCodec fused(codecOf("minmax4:bucket=512"));
  const Tensor x(normal(3000, 1, 1e-38f), DType::float32), state(normal(3000, 2, 1e-38f), DType::float32);
  const Outcome expected = delta(fused, x, state, 0, 3000), fed = feedback(fused, x, state, 0, 3000);
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(0x1f80 | 0x8040 | 0x6000);  // flush to zero, denormals are zero, round toward zero
  const Outcome got = delta(fused, x, state, 0, 3000), got_fed = feedback(fused, x, state, 0, 3000);
  _mm_setcsr(saved);
  EXPECT_EQ(got, expected);
  EXPECT_EQ(got_fed, fed);
}
#endif

}  // namespace
}  // namespace lowcomm
