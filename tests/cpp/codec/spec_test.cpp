#include "codec/spec.h"

#include <gtest/gtest.h>

#include <vector>

#include "base/error.h"
#include "codec/codec.h"
#include "errors.h"
#include "wire/frame.h"

namespace lowcomm {
namespace {

TEST(Spec, CanonicalText) {
  const struct {
    const char *text, *canonical;
  } cases[] = {
      {"none", "none"},
      {"minmax8", "minmax8:bucket=1024"},
      {"minmax8:bucket=1024", "minmax8:bucket=1024"},
      {"qsgd1:bucket=64", "qsgd1:bucket=64"},
      {"qsgd4:nonfinite=error", "qsgd4:bucket=1024"},
      {"qsgd4:nonfinite=error,bucket=65536", "qsgd4:bucket=65536"},
      {"mid2:nonfinite=poison,range=l2,meta=bf16", "mid2:bucket=1024,meta=bf16,range=l2,nonfinite=poison"},
      {"minmax4:meta=bf16,bucket=128", "minmax4:bucket=128,meta=bf16"},
      {"minmax4:meta=fp32", "minmax4:bucket=1024"},
      {"mid2:range=l2,meta=bf16", "mid2:bucket=1024,meta=bf16,range=l2"},
      {"sym2:range=l2", "sym2:bucket=1024,range=l2"},
      {"mid1:range=absmax", "mid1:bucket=1024"},
      {"sign1:bucket=64", "sign1:bucket=64"},
      {"lattice8:bucket=64", "lattice8:bucket=64"},
      {"minmax4:rotate=1", "minmax4:bucket=1024,rotate=1"},
      {"minmax4:rotate=0", "minmax4:bucket=1024"},
      {"qsgd4:rotate=1,meta=bf16,bucket=512", "qsgd4:bucket=512,meta=bf16,rotate=1"},
      {"lattice4:nonfinite=poison,rotate=1", "lattice4:bucket=1024,rotate=1,nonfinite=poison"},
      {"gauss4", "gauss4:bucket=512"},
      {"gauss1:meta=bf16,gain=1", "gauss1:bucket=512"},
      {"gauss2:gain=1.13", "gauss2:bucket=512,gain=1.13"},
      {"gauss8:nonfinite=poison,gain=2e0,meta=fp32,bucket=65536",
       "gauss8:bucket=65536,meta=fp32,gain=2,nonfinite=poison"},
      {"levels4", "levels4:bucket=1024"},
      {"levels1:meta=bf16,bucket=64", "levels1:bucket=64,meta=bf16"},
      {"minmax8:bucket=tensor", "minmax8:bucket=tensor"},
      {"sym4:meta=bf16,bucket=tensor,range=l2", "sym4:bucket=tensor,meta=bf16,range=l2"},
      {"sym4:axis=channel,C=16", "sym4:axis=channel,C=16"},
      {"sym4:nonfinite=poison,C=65536,meta=bf16,axis=channel", "sym4:axis=channel,C=65536,meta=bf16,nonfinite=poison"},
      {"qsgd2:C=1,axis=channel", "qsgd2:axis=channel,C=1"},
      {"fp16", "fp16"},
      {"fp16:nonfinite=poison", "fp16:nonfinite=poison"},
      {"bf16", "bf16"},
      {"fp16:nonfinite=error", "fp16"},
      {"topk", "topk:keep=0.2,values=sym8"},
      {"topk:nonfinite=poison,values=qsgd4,keep=1e-2", "topk:keep=0.01,values=qsgd4,nonfinite=poison"},
      {"topk:keep=1,values=sign1", "topk:keep=1,values=sign1"},
      {"topk:values=sym2,keep=64,chunk=4096", "topk:chunk=4096,keep=64,values=sym2"},
      {"logbyte", "logbyte"},
      {"log9", "log9"},
  };
  for (const auto& c : cases) {
    const CodecSpec spec = CodecSpec::parse(c.text);
    EXPECT_EQ(spec.str(), c.canonical);
    EXPECT_EQ(CodecSpec::parse(spec.str()), spec);
    EXPECT_EQ(makeCodec(spec)->spec(), spec);
  }
  EXPECT_EQ(CodecSpec::parse("minmax3:bucket=128"), (CodecSpec{CodecId::minmax, 3, 128}));
  EXPECT_EQ(CodecSpec::parse("qsgd8"), (CodecSpec{CodecId::qsgd, 8, 1024}));
}

TEST(Spec, RefusalsSayWhatAndWhy) {
  const struct {
    const char *text, *part, *expected;
  } cases[] = {
      {"", "name", "minmax1...minmax8"},
      {"int8", "name", "qsgd1...qsgd8"},
      {"None", "name", "none"},
      {" minmax8", "name", "minmax"},
      {"8", "name", "minmax"},
      {"minmax", "bits", "1...8"},
      {"minmax0", "bits", "1...8"},
      {"minmax9", "bits", "1...8"},
      {"minmax08", "bits", "1...8"},
      {"qsgd16", "bits", "1...8"},
      {"minmax8:", "option", "key=value"},
      {"minmax8:bucket", "option", "key=value"},
      {"minmax8:bucket=", "option", "key=value"},
      {"minmax8:=3", "option", "key=value"},
      {"minmax8:bucket=64,", "option", "key=value"},
      {"minmax8:buckets=64", "buckets", "bucket"},
      {"minmax8:bucket=1000", "bucket", "power of two"},
      {"minmax8:bucket=32", "bucket", "64...65536"},
      {"minmax8:bucket=131072", "bucket", "64...65536"},
      {"minmax8:bucket=99999999999", "bucket", "64...65536"},
      {"minmax8:bucket=064", "bucket", "power of two"},
      {"minmax8:bucket=64k", "bucket", "power of two"},
      {"minmax8:bucket=-64", "bucket", "power of two"},
      {"minmax8:bucket=64,bucket=64", "bucket", "once"},
      {"minmax8:nonfinite=saturate", "nonfinite", "error or poison, got 'saturate'"},
      {"none:bucket=64", "option", "none"},
      {"sym1", "bits", "2...8 after 'sym'"},
      {"sign", "bits", "1 after 'sign'"},
      {"sign2", "bits", "1 after 'sign'"},
      {"tern", "name", "sign1, levels1...levels8"},
      {"sym4:range=l1", "range", "absmax or l2"},
      {"minmax4:range=l2", "range", "sym or mid"},
      {"sign1:range=l2", "range", "sym or mid"},
      {"sym4:meta=fp16", "meta", "fp32 or bf16"},
      {"lattice4:meta=bf16", "meta", "fp32 with lattice"},
      {"dither4", "name", "qsgd1...qsgd8, lattice1...lattice8"},
      {"lattice", "bits", "1...8"},
      {"qsgd4:delta=1", "option",
       "bucket, axis, meta, range, rotate, gain, unit, chunk, keep, values, nonfinite, got 'delta'"},
      {"minmax4:bucket=0", "bucket", "power of two"},
      {"minmax4:axis=row", "axis", "channel"},
      {"minmax4:axis=channel,C=0", "C", "1...65536"},
      {"minmax4:axis=channel,C=65537", "C", "1...65536"},
      {"minmax4:axis=channel,C=016", "C", "1...65536"},
      {"minmax4:axis=channel,bucket=64", "bucket", "none with axis=channel"},
      {"minmax4:C=64", "C", "with axis=channel"},
      {"bf16:round=stochastic", "option", "got 'round'"},
      {"bf16:bucket=64", "bucket", "another codec"},
      {"minmax8:keep=0.2", "keep", "another codec"},
      {"minmax8:values=sym8", "values", "another codec"},
      {"fp8e4m3", "name", "fp16, bf16, topk"},
      {"bf16:meta=bf16", "meta", "another codec"},
      {"topk:keep=0", "keep", "above 0"},
      {"topk:keep=1.5", "keep", "at most 1"},
      {"topk:keep=nan", "keep", "at most 1"},
      {"topk:keep=1/5", "keep", "at most 1"},
      {"topk:chunk=4096", "keep", "with chunk"},
      {"topk:chunk=4096,keep=8192", "keep", "8 to half the chunk, got 8192 of chunk=4096"},
      {"topk:chunk=4096,keep=96", "keep", "power of two"},
      {"topk:chunk=4096,keep=4", "keep", "from 8"},
      {"topk:keep=64", "keep", "with chunk"},
      {"topk:chunk=tensor,keep=64", "chunk", "64...65536, got 'tensor'"},
      {"minmax8:chunk=64", "chunk", "another codec"},
      {"topk:values=none", "values", "grid codec"},
      {"topk:values=fp16", "values", "grid codec"},
      {"topk:values=sym9", "values", "2...8 after 'sym'"},
      {"topk:values=sym8:bucket=64", "values", "without options"},
      {"topk:bucket=64", "bucket", "another codec"},
      {"logbyte:nonfinite=poison", "nonfinite", "another codec"},
      {"log9:bits=9", "option", "nonfinite"},
      {"log8", "name", "log9"},
      {"topk:values=gauss4", "values", "grid codec"},
      {"topk:values=levels4", "values", "grid codec"},
      {"gauss4:bucket=tensor", "bucket", "512...65536"},
      {"minmax8:bucket=tensor,rotate=1", "bucket", "512...65536 where rotated"},
      {"minmax8:axis=channel,rotate=1", "rotate", "none with axis=channel"},
      {"gauss4:axis=channel", "axis", "none with gauss"},
      {"levels4:axis=channel", "axis", "none with levels"},
      {"minmax8:rotate=2", "rotate", "0 or 1"},
      {"minmax8:bucket=256,rotate=1", "bucket", "512...65536 where rotated"},
      {"gauss4:bucket=256", "bucket", "512...65536"},
      {"gauss4:rotate=1", "rotate", "none with gauss, which always is"},
      {"levels4:rotate=1", "rotate", "none with levels, got 1"},
      {"gauss9", "bits", "1...8 after 'gauss'"},
      {"gauss", "bits", "1...8 after 'gauss'"},
      {"gauss4:range=l2", "range", "sym or mid"},
      {"gauss4:gain=0", "gain", "0.001...1000"},
      {"gauss4:gain=nan", "gain", "0.001...1000"},
      {"minmax8:gain=1.1", "gain", "it with gauss"},
      {"levels0", "bits", "1...8 after 'levels'"},
  };
  for (const auto& c : cases) {
    const std::string what = test::thrownBy<ValueError>([&] { CodecSpec::parse(c.text); });
    EXPECT_TRUE(test::holds(what, {c.part, c.expected})) << c.text;
  }
}

TEST(Spec, WhatThisVersionLacksIsRefusedByName) {
  for (const char* text : {"fake:ratio=8", "minmax8:ratio=8"}) {
    const std::string what = test::thrownBy<ValueError>([&] { CodecSpec::parse(text); });
    EXPECT_TRUE(test::holds(what, {"this version does not have", "yet; it has"})) << text;
  }
}

TEST(Spec, CautionWhereTheErrorIsAsLargeAsTheValues) {
  for (const char* text :
       {"minmax1", "minmax2:bucket=tensor", "minmax2", "qsgd1:bucket=512", "qsgd2:bucket=65536", "mid2", "lattice2"}) {
    const auto said = caution(CodecSpec::parse(text));
    ASSERT_TRUE(said) << text;
    EXPECT_NE(said->find(CodecSpec::parse(text).str()), std::string::npos) << *said;
    EXPECT_NE(said->find("coarse for a bucket of"), std::string::npos) << *said;
  }
  for (const char* text : {"none", "minmax3", "qsgd8:bucket=65536", "minmax2:bucket=256", "qsgd1:bucket=64", "sym2",
                           "sign1", "mid3", "minmax2:rotate=1", "gauss1", "gauss2:bucket=4096", "levels2",
                           "minmax2:axis=channel", "minmax1:axis=channel,C=512", "fp16", "topk:values=minmax1"})
    EXPECT_FALSE(caution(CodecSpec::parse(text))) << text;
  EXPECT_EQ(
      caution(CodecSpec::parse("qsgd2")),
      "codec 'qsgd2:bucket=1024': 2 bits are coarse for a bucket of 1024: with 1024 elements the relative error was "
      "measured as 0.5 to 0.9 on weights and 1.0 to 1.8 on gradients; use 3 bits or more, or a bucket below 512");
  EXPECT_NE(caution(CodecSpec::parse("minmax1:bucket=tensor"))
                ->find("1 bit is coarse for a bucket of a whole tensor: with 1024 elements the relative error was "
                       "measured as 1.1 to 3.1 on weights"),
            std::string::npos);
}

// One rule says which codecs a user may write, a program may construct and a frame may carry.
TEST(Spec, BitsAndBucketsAreTheSameEverywhere) {
  const auto taken = [](auto&& attempt) { return test::thrownBy<ValueError>(attempt) == test::kNothing; };
  std::vector<CodecSpec> specs;
  for (int bits = 0; bits < 256; ++bits)
    specs.push_back({CodecId::minmax, static_cast<uint8_t>(bits), 1024});
  for (uint32_t bucket : {0, 1, 32, 63, 64, 65, 96, 128, 1000, 1024, 32768, 65535, 65536, 65537, 98304, 131072})
    specs.push_back({CodecId::minmax, 4, bucket});
  for (const CodecSpec& spec : specs) {
    const bool fine =
        isGridBits(*gridFamily(spec.id), spec.bits) && (spec.bucket == kTensorBucket || isGridBucket(spec.bucket));
    EXPECT_EQ(taken([&] { CodecSpec::parse(spec.str()); }), fine) << spec.str();
    EXPECT_EQ(taken([&] { makeCodec(spec); }), fine) << spec.str();
    FrameHeader header;
    header.codec = spec.id;
    header.bits = spec.bits;
    header.bucket = spec.bucket;
    std::vector<std::byte> frame(kFrameHeaderBytes);
    EXPECT_EQ(taken([&] { sealFrame(frame, header); }), fine) << spec.str();
  }
}

TEST(Spec, ChannelsComeFromTheTextOrTheTensor) {
  const CodecSpec open = CodecSpec::parse("sym4:axis=channel"), fixed = CodecSpec::parse("sym4:axis=channel,C=24");
  EXPECT_TRUE(open.open());
  EXPECT_FALSE(fixed.open());
  EXPECT_EQ(open.str(), "sym4:axis=channel");
  EXPECT_EQ(CodecSpec::parse(open.str()), open);
  EXPECT_EQ(open.withChannels(24), fixed);
  EXPECT_EQ(fixed.withChannels(24), fixed);
  EXPECT_EQ(CodecSpec::parse("sym4").withChannels(24), CodecSpec::parse("sym4"));
  EXPECT_THROW(fixed.withChannels(16), ValueError);
  EXPECT_THROW(open.withChannels(0), ValueError);
  EXPECT_THROW(open.withChannels(65537), ValueError);
  EXPECT_THROW(open.withChannels(uint64_t{1} << 32), ValueError);
  EXPECT_THROW(makeCodec(open), ValueError);
}

TEST(Spec, FramesOfRotatedCodecs) {
  const auto seals = [](const char* text, uint8_t change = 0) {
    const CodecSpec spec = CodecSpec::parse(text);
    FrameHeader header;
    header.codec = spec.id;
    header.bits = spec.bits;
    header.bucket = spec.bucket;
    header.flags = frameFlags(spec) ^ change;
    std::vector<std::byte> frame(kFrameHeaderBytes);
    return test::thrownBy<ValueError>([&] { sealFrame(frame, header); });
  };
  EXPECT_EQ(frameFlags(CodecSpec::parse("gauss4")), 0x24);
  EXPECT_EQ(frameFlags(CodecSpec::parse("qsgd4:rotate=1")), 0x21);
  for (const char* text : {"gauss4", "gauss4:meta=fp32", "levels3", "qsgd4:rotate=1", "sym4:rotate=1,range=l2"})
    EXPECT_EQ(seals(text), test::kNothing) << text;
  EXPECT_EQ(seals("gauss4", kRotatedFlag), "frame: flags: expected 32 or 4 more or 64 more for this codec, got 4");
  EXPECT_EQ(seals("levels4", kRotatedFlag), "frame: flags: expected 0 or 4 more for this codec, got 32");
  EXPECT_EQ(seals("minmax4:bucket=64", kRotatedFlag), "frame: bucket: expected a power of two in 512...65536, got 64");
}

TEST(Spec, RegistryRefusesWhatIsNoCodecOfElements) {
  EXPECT_THROW(makeCodec({CodecId::layout, 0, 0}), ValueError);
  EXPECT_THROW(makeCodec({static_cast<CodecId>(200), 0, 0}), ValueError);
  EXPECT_THROW(makeCodec({CodecId::minmax, 9, 64}), ValueError);
  EXPECT_THROW(makeCodec({CodecId::qsgd, 4, 100}), ValueError);
  EXPECT_THROW(makeCodec({CodecId::fp16, 4, 0}), ValueError);
  EXPECT_THROW(makeCodec({CodecId::fp16, 0, 64}), ValueError);
  EXPECT_THROW(makeCodec({CodecId::topk, 0, 0}), ValueError);
  EXPECT_NE(codecNames().find("qsgd1...qsgd8"), std::string::npos);
  EXPECT_NE(codecNames().find("fp16, bf16, topk, logbyte, log9"), std::string::npos);
}

}  // namespace
}  // namespace lowcomm
