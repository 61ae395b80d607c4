// The receiver's side of a delta on a device against the host's FusedCodec.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "codec/fused.h"
#include "codec/grid.h"
#include "codec/level_table.h"
#include "cuda/grid.h"
#include "cuda/plain_cases.h"

namespace lowcomm {
namespace {

using test::Bytes;
using test::elementsOf;
using test::kElementTypes;
using test::kPlainDraws;
using test::normal;
using test::OnDevice;

const char* const kTexts[] = {"minmax4:bucket=64",
                              "minmax8:bucket=1024,meta=bf16",
                              "qsgd3:bucket=512",
                              "dither5:bucket=128",
                              "lattice4:bucket=1024",
                              "sym4:bucket=1024",
                              "sym7:bucket=64,meta=bf16,range=l2",
                              "mid2:bucket=256",
                              "sign1:bucket=64",
                              "tern:bucket=128,meta=bf16",
                              "gauss2",
                              "gauss4",
                              "sym4:bucket=512,rotate=1"};

class CudaDecodeDelta : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda::deviceCount() == 0) GTEST_SKIP() << "no CUDA device";
  }
};

struct Outcome {
  Bytes y, after;
  bool operator==(const Outcome&) const = default;
};

// A memory, a payload against it, and the types of the memory and of the decoded elements.
struct Case {
  std::shared_ptr<const Codec> codec;
  DType of_memory, of_y;
  Bytes memory, payload;
  uint64_t count;

  Case(const std::string& text, size_t n, DType of_memory, DType of_y, const std::vector<float>& change)
      : codec(test::codecOf(text, *scalarKernels())),
        of_memory(of_memory),
        of_y(of_y),
        memory(elementsOf(normal(n, 2, 0.3f), of_memory)),
        payload(test::encoded(*codec, change, kPlainDraws)),
        count(n) {}

  Outcome here() const {
    Outcome outcome{Bytes(count * itemBytes(of_y)), memory};
    FusedCodec(codec).decodeDelta(payload, {outcome.y.data(), of_y}, {memory.data(), of_memory},
                                  {outcome.after.data(), of_memory}, 0, count);
    return outcome;
  }

  // `apart`: the new memory has a place of its own. Tensors lie `offset` elements past an aligned address.
  Outcome there(bool apart, uint32_t& refused, size_t offset = 0) const {
    const size_t skipped = offset * itemBytes(of_memory), skipped_y = offset * itemBytes(of_y);
    Bytes shifted(skipped);
    shifted.insert(shifted.end(), memory.begin(), memory.end());
    OnDevice<std::byte> before{std::span<const std::byte>(shifted)}, after(shifted.size(), std::byte{0x5a});
    OnDevice<std::byte> y(skipped_y + count * itemBytes(of_y), std::byte{0xa5});
    OnDevice<std::byte> from{std::span<const std::byte>(payload)};
    OnDevice<uint32_t> flag(1, refused);
    const cuda::FusedState m{before.data() + skipped, (apart ? after : before).data() + skipped, of_memory};
    cuda::decodeDelta({}, {codec->spec(), of_y, count}, y.data() + skipped_y, from.data(), m, flag.data());
    refused = flag.host()[0];
    if (apart) {
      EXPECT_EQ(before.host(), shifted);
    }
    const Bytes all = (apart ? after : before).host(), all_y = y.host();
    return {{all_y.begin() + static_cast<ptrdiff_t>(skipped_y), all_y.end()},
            {all.begin() + static_cast<ptrdiff_t>(skipped), all.end()}};
  }

  void expectSame(bool apart, size_t offset = 0) const {
    SCOPED_TRACE(codec->spec().str() + " of " + std::to_string(count) + " " + dtypeName(of_y) + " " +
                 dtypeName(of_memory));
    uint32_t refused = 0;
    const Outcome expected = here(), got = there(apart, refused, offset);
    ASSERT_EQ(got.after, expected.after);
    ASSERT_EQ(got.y, expected.y);
    ASSERT_EQ(refused, 0u);
  }
};

TEST_F(CudaDecodeDelta, EqualsTheHost) {
  size_t turn = 0;
  for (const char* text : kTexts) {
    for (size_t n : {0, 1, 17, 511, 513, 1025, 4200}) {
      ++turn;
      const Case c(text, n, kElementTypes[turn % 3], kElementTypes[turn / 3 % 3], normal(n, 1));
      ASSERT_NO_FATAL_FAILURE(c.expectSame(turn % 2 == 0, turn % 3));
    }
  }
}

TEST_F(CudaDecodeDelta, EveryPairOfTypes) {
  for (DType of_memory : kElementTypes) {
    for (DType of_y : kElementTypes)
      ASSERT_NO_FATAL_FAILURE(Case("gauss4", 2600, of_memory, of_y, normal(2600, 1)).expectSame(true));
  }
}

// A memory is held to its type's largest number, y is what the sum is rounded to.
TEST_F(CudaDecodeDelta, SumsBeyondANarrowType) {
  std::vector<float> change = normal(1500, 1);
  change[0] = 70000;
  change[900] = -80000;
  for (DType of_memory : {DType::float16, DType::bfloat16}) {
    for (DType of_y : kElementTypes)
      ASSERT_NO_FATAL_FAILURE(Case("minmax8:bucket=64", 1500, of_memory, of_y, change).expectSame(true));
  }
}

// Of a poisoned bucket y is NaN, and the memory keeps its value.
TEST_F(CudaDecodeDelta, PoisonChangesNoMemory) {
  std::vector<float> change = normal(3001, 3);
  change[0] = std::numeric_limits<float>::quiet_NaN();
  change[2999] = INFINITY;
  for (const char* text : {"minmax4:bucket=64,nonfinite=poison", "sym4:bucket=1024,nonfinite=poison",
                           "qsgd3:bucket=2048,nonfinite=saturate"}) {
    for (DType dtype : kElementTypes)
      ASSERT_NO_FATAL_FAILURE(Case(text, 3001, dtype, dtype, change).expectSame(true));
  }
}

TEST_F(CudaDecodeDelta, RefusesWhatAReaderDoes) {
  for (const char* text : {"minmax4:bucket=64", "gauss4", "sym4:bucket=1024"}) {
    Case c(text, 3001, DType::float32, DType::float32, normal(3001, 1));
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::memcpy(c.payload.data(), &nan, 4);  // the first bucket's scale
    uint32_t refused = 0;
    c.there(true, refused);
    EXPECT_EQ(refused, 1u) << text;
    EXPECT_THROW(c.here(), WireError);
  }
}

TEST_F(CudaDecodeDelta, NamesMistakes) {
  const cuda::GridRun run{CodecSpec::parse("gauss4"), DType::float32, 1};
  std::byte* const payload = nullptr;
  EXPECT_THROW(cuda::decodeDelta({}, run, payload, payload, {payload, payload, DType::int8}, nullptr), TypeError);
}

}  // namespace
}  // namespace lowcomm
