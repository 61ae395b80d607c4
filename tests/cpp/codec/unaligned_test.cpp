// A payload is bytes and lies anywhere: in a frame, in a file, in a buffer of Python's. Every codec at an odd address.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "base/narrow_float.h"
#include "grid_cases.h"

namespace lowcomm {
namespace {

using test::Bytes;
using test::normal;

constexpr const char* kTexts[] = {"none",
                                  "minmax3:bucket=64",
                                  "minmax8:bucket=128,meta=bf16",
                                  "minmax4:bucket=tensor",
                                  "qsgd4:bucket=512,meta=bf16,rotate=1",
                                  "qsgd5:bucket=64",
                                  "lattice7:bucket=64",
                                  "sym4:bucket=64,meta=bf16",
                                  "sym3:axis=channel,C=7",
                                  "minmax8:axis=channel,C=1,meta=bf16",
                                  "mid2:bucket=64,range=l2",
                                  "sign1:bucket=64,meta=bf16",
                                  "levels4:bucket=64",
                                  "levels2:bucket=512,meta=bf16",
                                  "gauss2",
                                  "gauss5:meta=fp32",
                                  "fp16",
                                  "bf16",
                                  "topk:keep=0.01",
                                  "topk:chunk=64,keep=8",
                                  "topk:keep=0.5,values=qsgd4",
                                  "logbyte",
                                  "log9"};

void expectAnywhere(const Codec& codec, DType dtype, size_t count) {
  const Draws draws{1, 2, 3};
  const Bytes x = test::elementsOf(dtype, normal(count, static_cast<uint32_t>(count)));
  const size_t size = codec.encodedBytes(count, dtype);
  Bytes payload(size), y(x.size());
  codec.encode(payload, x.data(), dtype, 0, count, draws);
  codec.decode(y.data(), dtype, payload, 0, count);
  const bool adds = codec.spec().id != CodecId::none;
  std::vector<float> sum(count, 1.0f);
  if (adds) codec.decodeAdd(sum.data(), dtype, payload, 0, count);

  constexpr std::byte kBeside{0xa5};
  for (size_t at : {1, 3}) {
    Bytes room(at + size + 1, kBeside);
    const std::span<std::byte> odd(room.data() + at, size);
    codec.encode(odd, x.data(), dtype, 0, count, draws);
    ASSERT_TRUE(std::equal(odd.begin(), odd.end(), payload.begin()));
    ASSERT_TRUE(room.back() == kBeside && std::count(room.begin(), room.begin() + at, kBeside) == ptrdiff_t(at));
    Bytes again(x.size());
    codec.decode(again.data(), dtype, odd, 0, count);
    ASSERT_EQ(again, y);
    if (!adds) continue;
    std::vector<float> sum_again(count, 1.0f);
    codec.decodeAdd(sum_again.data(), dtype, odd, 0, count);
    ASSERT_EQ(sum_again, sum);
  }
}

TEST(Unaligned, PayloadsOfEveryCodecAtOddAddresses) {
  std::set<CodecId> seen;
  for (const char* text : kTexts) {
    for (const KernelTable* form : test::allForms()) {
      const auto codec = test::codecWithTable(text, *form);
      seen.insert(codec->spec().id);
      for (DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
        for (size_t count : {0, 1, 7, 63, 511 * 7, 512 * 7, 513 * 7}) {
          if (codec->spec().axis == Axis::channel && count % codec->spec().bucket != 0) continue;
          SCOPED_TRACE(std::string(form->name) + " " + text + " " + dtypeName(dtype) + " " + std::to_string(count));
          expectAnywhere(*codec, dtype, count);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
  for (const GridFamily& family : kGridFamilies)
    EXPECT_TRUE(seen.contains(family.id)) << family.name;
  for (const PlainFamily& family : kPlainFamilies)
    EXPECT_TRUE(seen.contains(family.id)) << family.name;
}

}  // namespace
}  // namespace lowcomm
