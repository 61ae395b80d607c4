// Fused operations on a device against the host's FusedCodec, as grid_test.cpp has it.
#include "cuda/grid.h"

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "codec/fused.h"
#include "cuda/grid_on_device.h"

namespace lowcomm {
namespace {

using test::Bytes;
using test::elementsOf;
using test::kDraws;
using test::kElementTypes;
using test::kKey;
using test::normal;
using test::OnDevice;

const char* const kTexts[] = {"minmax4:bucket=64",
                              "minmax8:bucket=1024,meta=bf16",
                              "minmax3:bucket=4096",
                              "qsgd3:bucket=512",
                              "qsgd5:bucket=2048,meta=bf16",
                              "dither5:bucket=128",
                              "lattice4:bucket=1024",
                              "lattice4:bucket=64,delta=1",
                              "sym4:bucket=1024",
                              "sym7:bucket=64,meta=bf16,range=l2",
                              "mid2:bucket=256",
                              "mid4:bucket=4096,range=l2",
                              "sign1:bucket=64",
                              "sign1:bucket=2048",
                              "tern:bucket=128,meta=bf16"};

class CudaFused : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda::deviceCount() == 0) GTEST_SKIP() << "no CUDA device";
  }
};

enum class Operation { delta, feedback };
struct Outcome {
  Bytes payload, state;
  bool operator==(const Outcome&) const = default;
};

struct Tensor {
  Bytes bytes;
  DType dtype;
  Tensor(const std::vector<float>& values, DType dtype) : bytes(elementsOf(values, dtype)), dtype(dtype) {}
  uint64_t count() const { return bytes.size() / itemBytes(dtype); }
};

std::shared_ptr<const Codec> codecOf(const std::string& text) {
  return test::codecOf(text, *scalarKernels());
}

Outcome here(const std::shared_ptr<const Codec>& codec, Operation operation, const Tensor& x, Tensor state,
             uint64_t block) {
  FusedCodec fused(codec);
  Bytes payload(codec->encodedBytes(x.count(), DType::float32), std::byte{0xff});
  const Elements from{x.bytes.data(), x.dtype};
  const State to{state.bytes.data(), state.dtype};
  operation == Operation::delta ? fused.encodeDelta(payload, from, to, block * 512, x.count(), kDraws)
                                : fused.encodeFeedback(payload, from, to, block * 512, x.count(), kDraws);
  return {payload, state.bytes};
}

// The state's bytes afterwards: in its place, or in one of its own. Both lie `offset` elements past an aligned address.
Outcome there(const std::shared_ptr<const Codec>& codec, Operation operation, const Tensor& x, const Tensor& state,
              uint64_t block, bool apart, uint32_t& refused, size_t offset = 0) {
  const auto shifted = [&](const Tensor& tensor) {
    Bytes bytes(offset * itemBytes(tensor.dtype));
    bytes.insert(bytes.end(), tensor.bytes.begin(), tensor.bytes.end());
    return bytes;
  };
  const size_t skipped = offset * itemBytes(state.dtype);
  OnDevice<std::byte> elements{std::span<const std::byte>(shifted(x))};
  OnDevice<std::byte> before{std::span<const std::byte>(shifted(state))};
  OnDevice<std::byte> after(skipped + state.bytes.size(), std::byte{0x5a});
  OnDevice<std::byte> payload(codec->encodedBytes(x.count(), DType::float32), std::byte{0xff});
  OnDevice<uint32_t> flag(1, refused);
  const cuda::FusedState kept{before.data() + skipped, (apart ? after : before).data() + skipped, state.dtype};
  const auto run = operation == Operation::delta ? cuda::encodeDelta : cuda::encodeFeedback;
  run({}, {codec->spec(), x.dtype, x.count()}, payload.data(), elements.data() + offset * itemBytes(x.dtype), kept,
      block, kKey, flag.data());
  refused = flag.host()[0];
  if (apart) {
    EXPECT_EQ(before.host(), shifted(state));
  }
  const Bytes all = (apart ? after : before).host();
  return {payload.host(), {all.begin() + static_cast<ptrdiff_t>(skipped), all.end()}};
}

void expectSame(const std::string& text, const Tensor& x, const Tensor& state, uint64_t block = 0, size_t offset = 0) {
  const auto codec = codecOf(text);
  for (Operation operation : {Operation::delta, Operation::feedback}) {
    SCOPED_TRACE(text + " of " + std::to_string(x.count()) + " " + dtypeName(x.dtype) + " " + dtypeName(state.dtype) +
                 (operation == Operation::delta ? " delta" : " feedback"));
    const Outcome expected = here(codec, operation, x, state, block);
    const bool apart = (x.count() + block) % 2 == 0;
    uint32_t refused = 0;
    const Outcome got = there(codec, operation, x, state, block, apart, refused, offset);
    ASSERT_EQ(got.payload, expected.payload);
    ASSERT_EQ(got.state, expected.state);
    ASSERT_EQ(refused, 0u);
  }
}

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST_F(CudaFused, DeltaAndFeedbackEqualTheHost) {
  size_t turn = 0;
  for (const std::string text : kTexts) {
    const size_t bucket = codecOf(text)->spec().bucket;
    for (size_t n :
         {size_t{0}, size_t{1}, size_t{17}, size_t{511}, size_t{513}, bucket - 1, bucket + 1, bucket + 777}) {
      ++turn;
      const Tensor x(normal(n, 1), kElementTypes[turn % 3]), state(normal(n, 2, 0.3f), kElementTypes[turn / 3 % 3]);
      ASSERT_NO_FATAL_FAILURE(expectSame(text, x, state, turn % 4 * 128));
    }
  }
}

TEST_F(CudaFused, EveryPairOfTypesWhereverTheyLie) {
  for (const char* text : {"minmax4:bucket=512", "sym4:bucket=2048"}) {
    for (DType of_x : kElementTypes) {
      for (DType of_state : kElementTypes) {
        for (size_t offset : {0, 1, 2})
          ASSERT_NO_FATAL_FAILURE(
              expectSame(text, {normal(2600, 1), of_x}, {normal(2600, 2, 0.3f), of_state}, 0, offset));
      }
    }
  }
}

TEST_F(CudaFused, FarBlocksAndMoreThanALaunchHolds) {
  constexpr uint64_t kFar = (uint64_t{1} << 36) / 512 * 5;
  for (const char* text : {"qsgd4:bucket=64", "dither4:bucket=2048", "lattice4:bucket=1024"})
    ASSERT_NO_FATAL_FAILURE(
        expectSame(text, {normal(2600, 1), DType::float32}, {normal(2600, 2), DType::bfloat16}, kFar));
  constexpr size_t kMany = 65 * 4 * 512 + 77;
  for (const char* text : {"sym4:bucket=64", "minmax4:bucket=1024", "sign1:bucket=2048"})
    ASSERT_NO_FATAL_FAILURE(expectSame(text, {normal(kMany, 1), DType::float32}, {normal(kMany, 2), DType::float32}));
}

// A state of a narrow type is held to what it can be; a NaN in it is its owner's, whichever one it is.
TEST_F(CudaFused, StatesOfNarrowTypes) {
  for (const char* text : {"minmax8:bucket=64", "sym4:bucket=1024,nonfinite=saturate"}) {
    std::vector<float> x = normal(1500, 1), state = normal(1500, 2);
    x[0] = 70000;
    x[900] = -80000;
    if (std::string(text).starts_with("sym")) state[700] = kNan;
    for (DType dtype : {DType::float16, DType::bfloat16})
      ASSERT_NO_FATAL_FAILURE(expectSame(text, {x, DType::float32}, {state, dtype}));
  }
}

// A step with what no codec takes in it: the payload says what the policy does, and the state stays finite.
TEST_F(CudaFused, WhatIsNotFiniteIsForgotten) {
  for (const char* policy : {"saturate", "poison"}) {
    for (const char* text : {"minmax4:bucket=64", "qsgd3:bucket=2048", "lattice4:bucket=1024", "sym4:bucket=512",
                             "mid3:bucket=4096,range=l2", "sign1:bucket=64", "tern:bucket=1024"}) {
      for (DType dtype : kElementTypes) {
        std::vector<float> x = normal(5001, 3), state = normal(5001, 4, 0.3f);
        x[0] = kNan;
        x[700] = INFINITY;
        x[2000] = -INFINITY;
        x[5000] = kNan;
        if (dtype != DType::float16) {
          x[900] = 0x1p126f;
          x[901] = -0x1.8p127f;
          state[901] = 0x1p120f;
        }
        state[3000] = kNan;  // the caller's own stays
        state[3003] = INFINITY;
        const DType of_state = dtype == DType::float16 ? DType::float32 : dtype;
        ASSERT_NO_FATAL_FAILURE(expectSame(std::string(text) + ",nonfinite=" + policy, {x, dtype}, {state, of_state}));
      }
    }
  }
}

// A refused call: buckets that are refused keep their state, and one of its own is left to whoever gave it.
TEST_F(CudaFused, WhatIsRefusedKeepsItsState) {
  for (const char* text : {"minmax4:bucket=64", "qsgd4:bucket=1024", "dither4:bucket=4096", "sym4:bucket=64",
                           "mid3:bucket=1024,range=l2", "sign1:bucket=2048", "qsgd2:bucket=512,delta=4"}) {
    const auto codec = codecOf(text);
    const bool spans = std::strstr(text, "delta") != nullptr;
    const uint32_t bucket = codec->spec().bucket;
    for (Operation operation : {Operation::delta, Operation::feedback}) {
      for (float bad : {kNan, INFINITY, -0x1p126f}) {
        for (size_t at : {size_t{0}, size_t{1023}, size_t{5000}}) {
          std::vector<float> x = normal(5001, 3);
          const Tensor state(normal(5001, 4, 0.3f), DType::float32);
          const Outcome good = here(codec, operation, {x, DType::float32}, state, 0);
          x[at] = spans ? 100.0f : bad;
          uint32_t refused = 0;
          const Bytes got = there(codec, operation, {x, DType::float32}, state, 0, false, refused).state;
          ASSERT_EQ(refused, 1u) << text << " " << at;
          for (size_t i = 0; i < 5001; ++i) {
            const Bytes& expected = i / bucket == at / bucket ? state.bytes : good.state;
            ASSERT_EQ(std::memcmp(&got[4 * i], &expected[4 * i], 4), 0) << text << " " << i;
          }
          there(codec, operation, {x, DType::float32}, state, 0, true, refused);  // asks after `before` itself
        }
      }
    }
  }
}

// A sum here and there of `ranks` contributions, of which one is own elements where that is a rank's number.
struct Sum {
  std::shared_ptr<const Codec> codec;
  DType dtype;
  std::vector<Bytes> payloads;
  std::optional<size_t> own;
  Bytes own_elements;

  Sum(const std::string& text, size_t ranks, std::optional<size_t> own, DType dtype, size_t n)
      : codec(codecOf(text)), dtype(dtype), own(own), own_elements(elementsOf(normal(n, 99), dtype)) {
    for (size_t rank = 0; rank < ranks; ++rank)
      payloads.push_back(test::encoded(*codec, normal(n, static_cast<uint32_t>(rank)), kDraws));
  }

  uint64_t count() const { return own_elements.size() / itemBytes(dtype); }

  Outcome here(int average_over, uint64_t block) const {
    std::vector<Contribution> terms;
    for (size_t rank = 0; rank < payloads.size(); ++rank)
      terms.push_back(rank == own ? Contribution{{}, own_elements.data()} : Contribution{payloads[rank], nullptr});
    Bytes payload(codec->encodedBytes(count(), DType::float32), std::byte{0xff}), out(own_elements.size());
    FusedCodec(codec).encodeSum(payload, out.data(), dtype, terms, average_over, block * 512, count(), kDraws);
    return {payload, out};
  }

  // `in_place`: out is the own contribution.
  Outcome there(uint32_t average_over, uint64_t block, bool in_place, uint32_t& refused) const {
    std::vector<std::unique_ptr<OnDevice<std::byte>>> devices;
    for (const Bytes& payload : payloads)
      devices.push_back(std::make_unique<OnDevice<std::byte>>(std::span<const std::byte>(payload)));
    OnDevice<std::byte> mine{std::span<const std::byte>(own_elements)}, out(own_elements.size(), std::byte{0x5a});
    OnDevice<std::byte> payload(codec->encodedBytes(count(), DType::float32), std::byte{0xff});
    OnDevice<uint32_t> flag(1, refused);
    std::vector<cuda::FusedTerm> terms;
    for (size_t rank = 0; rank < payloads.size(); ++rank)
      terms.push_back(rank == own ? cuda::FusedTerm{nullptr, mine.data()} : cuda::FusedTerm{devices[rank]->data()});
    auto& to = in_place ? mine : out;
    cuda::encodeSum({}, {codec->spec(), dtype, count()}, payload.data(), to.data(), terms, average_over, block, kKey,
                    flag.data());
    refused = flag.host()[0];
    return {payload.host(), to.host()};
  }

  void expectSame(uint32_t average_over, uint64_t block) const {
    SCOPED_TRACE(codec->spec().str() + " of " + std::to_string(count()) + " " + dtypeName(dtype) + ", ranks " +
                 std::to_string(payloads.size()));
    uint32_t refused = 0;
    const Outcome expected = here(static_cast<int>(average_over), block);
    const Outcome got = there(average_over, block, own.has_value() && count() % 2 == 0, refused);
    ASSERT_EQ(got.payload, expected.payload);
    ASSERT_EQ(got.state, expected.state);
    ASSERT_EQ(refused, 0u);
  }
};

TEST_F(CudaFused, SumsEqualTheHost) {
  size_t turn = 0;
  for (const std::string text : kTexts) {
    const size_t bucket = codecOf(text)->spec().bucket;
    if (text.find("delta") != std::string::npos) continue;  // sums span more
    for (size_t n : {size_t{0}, size_t{1}, size_t{511}, bucket + 1, bucket + 778}) {
      ++turn;
      const size_t ranks = 1 + turn % 4;
      const auto own = turn % 3 == 0 ? std::nullopt : std::optional(turn % ranks);
      const Sum sum(text, ranks, own, kElementTypes[turn % 3], n);
      ASSERT_NO_FATAL_FAILURE(sum.expectSame(turn % 2 ? static_cast<uint32_t>(ranks) : 0, turn % 5 * 128));
    }
  }
  ASSERT_NO_FATAL_FAILURE(Sum("qsgd4:bucket=512", 64, 63, DType::float32, 2000).expectSame(64, 0));
}

// Of 16384 elements and more, a thread block keeps a part and makes the others again in each pass.
TEST_F(CudaFused, BucketsLargerThanWhatAThreadBlockKeeps) {
  for (const std::string codec : {"minmax3:bucket=8192", "qsgd4:bucket=16384", "sym4:bucket=16384,range=l2",
                                  "sign1:bucket=32768", "dither5:bucket=65536"}) {
    const size_t bucket = codecOf(codec)->spec().bucket;
    for (const char* policy : {"", ",nonfinite=saturate", ",nonfinite=poison"}) {
      const std::string text = codec + policy;
      for (size_t n : {bucket / 2 + 5000, 2 * bucket + 777}) {
        std::vector<float> x = normal(n, 1);
        if (*policy) {
          x[n - 1] = kNan;
          x[5] = INFINITY;
          x[n / 2] = 70000.0f;
        }
        ASSERT_NO_FATAL_FAILURE(expectSame(text, {x, DType::float32}, {normal(n, 2, 0.3f), DType::bfloat16}, 128));
        Sum sum(text, 3, 1, DType::float32, n);
        sum.own_elements = elementsOf(x, DType::float32);
        ASSERT_NO_FATAL_FAILURE(sum.expectSame(n % 2 * 3, 128));
      }
    }
  }
}

TEST_F(CudaFused, PoisonGoesThroughASum) {
  for (const char* text : {"minmax4:bucket=64,nonfinite=poison", "sym4:bucket=1024,nonfinite=poison",
                           "qsgd4:bucket=2048,nonfinite=poison", "minmax4:bucket=512,nonfinite=saturate"}) {
    for (DType dtype : kElementTypes) {
      Sum sum(text, 3, 1, dtype, 3001);
      std::vector<float> x = normal(3001, 7);
      x[100] = kNan;
      x[2999] = INFINITY;
      sum.payloads[2] = test::encoded(*sum.codec, x, kDraws);
      x[1500] = -INFINITY;
      sum.own_elements = elementsOf(x, dtype);
      ASSERT_NO_FATAL_FAILURE(sum.expectSame(3, 0));
    }
  }
}

// Of a contribution: a scale, a code, an unused bit, padding.
TEST_F(CudaFused, ContributionsThatAReaderRefuses) {
  for (const char* text : {"minmax3:bucket=64", "tern:bucket=64", "sym4:bucket=2048"}) {
    const Sum good(text, 3, 0, DType::float32, 2605);
    uint32_t refused = 0;
    good.there(0, 0, false, refused);
    EXPECT_EQ(refused, 0u);
    const size_t bytes = good.payloads[1].size();
    const size_t centred = gridFamily(good.codec->spec().id)->centred ? 4 : 8;
    const size_t meta = centred * ((2605 + good.codec->spec().bucket - 1) / good.codec->spec().bucket);
    size_t refusals = 0;
    for (size_t byte : {size_t{2}, meta - 2, meta, meta + 1, bytes - 2, bytes - 4}) {
      Sum bad = good;
      bad.payloads[2][byte] = bad.payloads[2][byte + 1] = std::byte{0xff};
      bool refuses = false;
      try {
        bad.here(0, 0);
      } catch (const WireError&) {
        refuses = true;
      }
      refused = 0;
      bad.there(0, 0, false, refused);
      EXPECT_EQ(refused != 0, refuses) << text << " byte " << byte;
      refusals += refuses;
    }
    EXPECT_GE(refusals, 4u) << text;
  }
  Sum nan("minmax4:bucket=64", 2, 0, DType::float32, 700);
  nan.own_elements = elementsOf(std::vector<float>(700, kNan), DType::float32);
  uint32_t refused = 0;
  nan.there(0, 0, false, refused);
  EXPECT_EQ(refused, 1u);
}

TEST_F(CudaFused, WhatACallerIsTold) {
  alignas(16) static std::byte payload[256];
  const auto text = [&](auto&& call) -> std::string {
    try {
      call();
    } catch (const std::exception& error) {
      return error.what();
    }
    return "no error";
  };
  const cuda::GridRun run{CodecSpec::parse("minmax4:bucket=64"), DType::float32, 1};
  EXPECT_EQ(
      text([&] { cuda::encodeDelta({}, run, payload, payload, {payload, payload, DType::int8}, 0, {}, nullptr); }),
      "encode delta: state: expected float32, float16 or bfloat16, got int8");
  for (const char* other : {"gauss4", "sym4:bucket=512,rotate=1"}) {
    const cuda::GridRun rotated{CodecSpec::parse(other), DType::float32, 1};
    EXPECT_EQ(
        text([&] {
          cuda::encodeFeedback({}, rotated, payload, payload, {payload, payload, DType::float32}, 0, {}, nullptr);
        }),
        "encode feedback: codec: expected a grid codec without rotation and codebook, got " + rotated.codec.str());
  }
  EXPECT_EQ(text([&] { cuda::encodeSum({}, run, payload, payload, {}, 0, 0, {}, nullptr); }),
            "encode sum: terms: expected 1...64, got 0");
  const std::vector<cuda::FusedTerm> many(65, cuda::FusedTerm{payload});
  EXPECT_EQ(text([&] { cuda::encodeSum({}, run, payload, payload, many, 0, 0, {}, nullptr); }),
            "encode sum: terms: expected 1...64, got 65");
  const std::vector<cuda::FusedTerm> odd{{payload}, {payload + 4}};
  EXPECT_EQ(text([&] { cuda::encodeSum({}, run, payload, payload, odd, 0, 0, {}, nullptr); }),
            "encode sum: payload of term 1: expected an address that is a multiple of 16, got 4 more");
}

}  // namespace
}  // namespace lowcomm
