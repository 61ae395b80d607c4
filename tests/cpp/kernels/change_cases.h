#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "base/float_env.h"
#include "codec/change.h"
#include "grid_cases.h"
#include "kernels/change/change.h"

namespace lowcomm::test {

constexpr MemoryType kMemories[] = {MemoryType::float32, MemoryType::float16, MemoryType::bfloat16};
inline const char* const kChangeTexts[] = {
    "minmax4:bucket=512",        "minmax3:bucket=64",  "minmax8:bucket=1024,meta=bf16",
    "minmax1:bucket=256",        "qsgd4:bucket=128",   "qsgd7:bucket=1024",
    "qsgd2:bucket=64,delta=2",   "dither6:bucket=256", "lattice5:bucket=64",
    "sym4:bucket=1024",          "sym2:bucket=64",     "sym8:bucket=512,range=l2",
    "mid3:bucket=128",           "tern:bucket=64",     "sign1:bucket=512",
    "sym6:bucket=1024,meta=bf16"};

// A memory of one of the three types.
struct Remembered {
  Remembered(const std::vector<float>& values, MemoryType of) : type(of), bytes(values.size() * size(of)) {
    std::vector<float> scratch = values;
    const DType dtype = of == MemoryType::float32   ? DType::float32
                        : of == MemoryType::float16 ? DType::float16
                                                    : DType::bfloat16;
    keep(*scalarKernels(), {bytes.data(), dtype}, scratch.data(), values.size());
  }
  static size_t size(MemoryType of) { return of == MemoryType::float32 ? 4 : 2; }

  MemoryType type;
  Bytes bytes;
};

struct Changed {
  size_t done;
  Bytes meta, words, inside, apart, decoded_inside, decoded_apart;
  std::vector<float> y;
};

// What the loops make of x and a memory: in place and apart, encoded and decoded.
inline Changed changed(const ChangeKernels& loops, const std::string& text, const std::vector<float>& x,
                       const Remembered& m, uint64_t block) {
  const CodecSpec spec = CodecSpec::parse(text);
  const GridFamily& family = *gridFamily(spec.id);
  GridForm form = gridForm(spec);
  form.bucket = spec.bucket;
  const size_t n = x.size(), type = static_cast<size_t>(m.type);
  const PhiloxKey key{0x123456789abcdefull, 7, 9};
  const auto encode = loops.encode[type][static_cast<size_t>(gridRule(family))];
  const auto decode = loops.decode[type][family.centred];
  Changed out;
  out.meta = Bytes(8 * (n / form.bucket), std::byte{0xa5});
  out.words = Bytes(n, std::byte{0xa5});
  out.inside = m.bytes;
  out.apart = Bytes(m.bytes.size(), std::byte{0x5a});
  FloatEnv env;
  out.done = encode(out.meta.data(), out.words.data(), x.data(), out.inside.data(), out.inside.data(), n, form,
                    spec.bits, block, key);
  const size_t again = encode(out.meta.data(), out.words.data(), x.data(), m.bytes.data(), out.apart.data(), n, form,
                              spec.bits, block, key);
  EXPECT_EQ(again, out.done);
  if (out.done < n) return out;
  out.decoded_inside = m.bytes;
  out.decoded_apart = Bytes(m.bytes.size(), std::byte{0x5a});
  out.y.assign(n, -1);
  decode(out.y.data(), out.decoded_inside.data(), out.decoded_inside.data(), out.meta.data(), out.words.data(), n, form,
         spec.bits);
  decode(out.y.data(), m.bytes.data(), out.decoded_apart.data(), out.meta.data(), out.words.data(), n, form, spec.bits);
  return out;
}

// Whether the loops give the bytes and values of the scalar ones, and all places the same.
inline void expectScalarChanges(const ChangeKernels& loops) {
  for (const std::string text : kChangeTexts) {
    for (MemoryType type : kMemories) {
      for (size_t n : {1024, 2048, 5120}) {
        for (uint64_t block : {uint64_t{0}, uint64_t{1} << 27}) {  // from where counter word 1 is not 0, too
          SCOPED_TRACE(text + " of " + std::to_string(n) + ", memory " + std::to_string(static_cast<int>(type)));
          std::vector<float> x = normal(n, 1, text.find("delta") == std::string::npos ? 3 : 0.2f);
          x[n / 2] = type == MemoryType::float16 && text.find("delta") == std::string::npos ? 7e4f : x[n / 2];
          const Remembered m(normal(n, 2, 0.3f), type);
          const Changed expected = changed(*scalarKernels()->changes, text, x, m, block);
          const Changed got = changed(loops, text, x, m, block);
          ASSERT_EQ(expected.done, n);
          ASSERT_EQ(got.done, n);
          ASSERT_EQ(got.meta, expected.meta);
          ASSERT_EQ(got.words, expected.words);
          for (const Bytes* after : {&got.inside, &got.apart, &got.decoded_inside, &got.decoded_apart})
            ASSERT_EQ(*after, expected.inside);
          ASSERT_EQ(std::memcmp(got.y.data(), expected.y.data(), n * sizeof(float)), 0);
        }
      }
    }
  }
}

// An element that is refused stops the loops at its group; the memory before it is new, behind it as it was, and of the
// group itself the same elements are refused again.
inline void expectRefusals(const ChangeKernels& loops) {
  for (const std::string text : {"minmax4:bucket=512", "qsgd4:bucket=128", "lattice5:bucket=64", "sym4:bucket=1024",
                                 "sign1:bucket=64", "dither2:bucket=1024"}) {
    const size_t group = std::max<size_t>(512, CodecSpec::parse(text).bucket);
    for (MemoryType type : kMemories) {
      for (float bad : {NAN, INFINITY, -INFINITY}) {
        for (size_t at : {0, 1500, 4095}) {
          SCOPED_TRACE(text + " " + std::to_string(bad) + " at " + std::to_string(at));
          std::vector<float> x = normal(4096, 1);
          const Remembered m(normal(4096, 2), type);
          const Changed good = changed(loops, text, x, m, 0);
          x[at] = bad;
          const Changed got = changed(loops, text, x, m, 0);
          const size_t done = at / group * group, size = Remembered::size(type);
          ASSERT_EQ(got.done, done);
          ASSERT_EQ(std::memcmp(got.inside.data(), good.inside.data(), done * size), 0);
          const size_t behind = (done + group) * size;
          ASSERT_EQ(std::memcmp(got.inside.data() + behind, m.bytes.data() + behind, m.bytes.size() - behind), 0);
          std::vector<float> after(4096);
          const DType dtype = type == MemoryType::float32   ? DType::float32
                              : type == MemoryType::float16 ? DType::float16
                                                            : DType::bfloat16;
          const float* now = widened(*scalarKernels(), {got.inside.data(), dtype}, 4096, after.data());
          for (size_t i = 0; i < 4096; ++i)
            ASSERT_EQ(std::isfinite(x[i] - now[i]), i != at) << i;
        }
      }
    }
  }
}

}  // namespace lowcomm::test
