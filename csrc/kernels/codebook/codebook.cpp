#include "kernels/codebook/codebook.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "base/float_env.h"
#include "base/narrow_float.h"
#include "kernels/finite.h"
#include "kernels/isa/table.h"

namespace lowcomm {

namespace {

// The levels above 0 of gauss1 ... gauss8, ascending: Lloyd and Max's quantizer of the normal distribution (S. P.
// Lloyd, Least Squares Quantization in PCM; J. Max, Quantizing for Minimum Distortion), each the mean of what is
// nearest to it. Those below 0 mirror them. FORMAT.md, "gauss", has the same numbers.
constexpr float kGaussLevels[255] = {
    // clang-format off
    // gauss1
    0.797884583f,
    // gauss2
    0.452780038f, 1.51041758f,
    // gauss3
    0.24509418f, 0.756005287f, 1.34390926f, 2.15194559f,
    // gauss4
    0.128395036f, 0.388048291f, 0.656759143f, 0.942340434f, 1.25623119f, 1.6180464f, 2.06901717f, 2.73258948f,
    // gauss5
    0.0658896565f, 0.198051825f, 0.331378311f, 0.466699511f, 0.604933619f, 0.747135699f, 0.894565105f, 1.0487833f,
    1.21180439f, 1.38634038f, 1.57622802f, 1.78723323f, 2.02872849f, 2.31773949f, 2.69111967f, 3.26073241f,
    // gauss6
    0.0334095061f, 0.100278288f, 0.167296901f, 0.234566987f, 0.302192837f, 0.37028265f, 0.438949674f, 0.508313775f,
    0.578503013f, 0.649655581f, 0.721921921f, 0.795467675f, 0.870476604f, 0.947154939f, 1.02573633f, 1.10648823f,
    1.18972015f, 1.27579451f, 1.36514103f, 1.45827639f, 1.55583119f, 1.65858889f, 1.76754189f, 1.88397729f, 2.00961113f,
    2.14681029f, 2.29898119f, 2.47130489f, 2.67227387f, 2.9174068f, 3.24043703f, 3.74410129f,
    // gauss7
    0.01682817f, 0.0504908636f, 0.0841726437f, 0.117886283f, 0.151644647f, 0.185460716f, 0.219347641f, 0.253318727f,
    0.28738755f, 0.321567953f, 0.355874032f, 0.390320301f, 0.424921662f, 0.459693432f, 0.494651467f, 0.529812217f,
    0.56519264f, 0.600810528f, 0.636684299f, 0.672833323f, 0.709277868f, 0.746039152f, 0.783139646f, 0.820602953f,
    0.858454227f, 0.896719933f, 0.9354285f, 0.974609971f, 1.01429665f, 1.05452323f, 1.09532666f, 1.13674736f,
    1.1788286f, 1.22161746f, 1.26516509f, 1.30952764f, 1.35476625f, 1.40094852f, 1.44814897f, 1.49644995f, 1.54594374f,
    1.59673309f, 1.64893389f, 1.70267701f, 1.75811148f, 1.81540775f, 1.87476254f, 1.93640459f, 2.00060177f, 2.06767154f,
    2.13799334f, 2.21202755f, 2.29033923f, 2.37363434f, 2.46281147f, 2.55904055f, 2.66388655f, 2.77951431f, 2.90904713f,
    3.05724621f, 3.23193312f, 3.44743037f, 3.73493671f, 4.18969393f,
    // gauss8
    0.0084461933f, 0.0253393836f, 0.0422349833f, 0.0591346025f, 0.0760398582f, 0.0929523557f, 0.10987372f, 0.126805589f,
    0.143749565f, 0.160707325f, 0.177680492f, 0.194670752f, 0.211679757f, 0.228709206f, 0.245760784f, 0.262836218f,
    0.279937238f, 0.297065586f, 0.314223051f, 0.331411391f, 0.348632425f, 0.365888f, 0.383179963f, 0.400510222f,
    0.417880654f, 0.435293198f, 0.452749878f, 0.470252663f, 0.487803608f, 0.50540477f, 0.523058295f, 0.540766299f,
    0.558531046f, 0.576354682f, 0.594239593f, 0.612188101f, 0.630202591f, 0.648285508f, 0.666439414f, 0.684666753f,
    0.702970266f, 0.721352637f, 0.739816606f, 0.758365035f, 0.777000844f, 0.795727015f, 0.814546704f, 0.833463013f,
    0.852479279f, 0.871598899f, 0.890825272f, 0.910162032f, 0.929612935f, 0.949181795f, 0.968872607f, 0.988689363f,
    1.00863647f, 1.02871823f, 1.04893923f, 1.06930423f, 1.08981812f, 1.11048603f, 1.1313132f, 1.15230536f, 1.17346823f,
    1.19480765f, 1.21632993f, 1.23804176f, 1.25994992f, 1.28206146f, 1.30438399f, 1.32692528f, 1.34969366f, 1.37269759f,
    1.39594638f, 1.41944933f, 1.44321656f, 1.46725869f, 1.49158704f, 1.51621318f, 1.54114962f, 1.56640983f, 1.59200752f,
    1.61795783f, 1.6442765f, 1.67098033f, 1.69808745f, 1.72561693f, 1.75358939f, 1.78202689f, 1.81095314f, 1.8403933f,
    1.87037516f, 1.90092802f, 1.9320842f, 1.96387839f, 1.9963485f, 2.02953577f, 2.06348515f, 2.09824657f, 2.13387418f,
    2.17042828f, 2.20797539f, 2.2465899f, 2.28635454f, 2.32736182f, 2.36971712f, 2.41353869f, 2.4589622f, 2.50614262f,
    2.55525947f, 2.60652137f, 2.66017389f, 2.71650767f, 2.77587056f, 2.83868575f, 2.90547299f, 2.97688222f, 3.05374193f,
    3.13713264f, 3.22850013f, 3.32984853f, 3.44407177f, 3.57558799f, 3.73166633f, 3.92563772f, 4.18659544f, 4.60353565f,
    // clang-format on
};

// Where those of `bits` bits start: 2^(bits - 1) of them.
constexpr size_t gaussLevelsAt(int bits) {
  return (size_t{1} << (bits - 1)) - 1;
}

uint32_t bitsOfFloat(float x) {
  return std::bit_cast<uint32_t>(x);
}

// Levels are given; the thresholds between them, and what fills the arrays up.
void setThresholds(Codebook& book, int bits) {
  const size_t count = size_t{1} << bits;
  book.bits = bits;
  std::fill(book.level + count, std::end(book.level), book.level[count - 1]);
  std::fill(std::begin(book.threshold), std::end(book.threshold), std::numeric_limits<float>::infinity());
  for (size_t i = 0; i + 1 < count; ++i)
    book.threshold[i] = (book.level[i] + book.level[i + 1]) * 0.5f;
}

void setGaussCells(Codebook& book) {
  constexpr uint32_t kUsed = 512;
  const uint32_t half = 1u << (book.bits - 1);
  const float* threshold = book.threshold + half;  // above 0
  uint32_t below = 0;
  for (uint32_t cell = 0; cell < kUsed; ++cell) {
    // Past the cell's upper end, and past what a tie adds to t's bits (codebook.inl).
    uint32_t own = bitsOfFloat((static_cast<float>(cell) + 0.5f) / 64) + 2;
    const uint32_t code = half + below;
    if (below < half - 1 && bitsOfFloat(threshold[below] + Codebook::kGaussMagic) % kUsed == cell) {
      own = bitsOfFloat(threshold[below]);
      ++below;
    }
    book.cell[cell] = own << 8 | code;
  }
  book.most_a_cell = 1;
  for (int j = 0; j < 8 && book.bits == 4; ++j) {
    const int at = (j + Codebook::kNearestShift) % 8;
    book.nearest[at] = book.nearest[at + 8] = j == 0 ? -1 : threshold[j - 1];
  }
}

// Not inlined: the control register must be set before the first sum (float_env.h).
__attribute__((noinline)) std::array<Codebook, 8> gaussCodebooks() {
  std::array<Codebook, 8> books{};
  for (int bits = 1; bits <= 8; ++bits) {
    Codebook& book = books[bits - 1];
    const size_t half = size_t{1} << (bits - 1);
    for (size_t i = 0; i < half; ++i) {
      book.level[half + i] = kGaussLevels[gaussLevelsAt(bits) + i];
      book.level[half - 1 - i] = -book.level[half + i];
    }
    setThresholds(book, bits);
    setGaussCells(book);
  }
  return books;
}

}  // namespace

void makeLevels(Codebook& book, int bits, const float* levels) {
  const uint32_t thresholds = (1u << bits) - 1;
  std::copy_n(levels, size_t{thresholds} + 1, book.level);
  setThresholds(book, bits);
  book.most_a_cell = 0;
  uint32_t below = 0;
  for (uint32_t cell = 0; cell < Codebook::kCells; ++cell) {
    book.cell[cell] = below;
    int here = 0;
    for (; below < thresholds; ++below, ++here) {
      if (bitsOfFloat(book.threshold[below] + Codebook::kLevelsMagic) % Codebook::kCells != cell) break;
    }
    book.most_a_cell = std::max(book.most_a_cell, here);
  }
}

const Codebook& gaussCodebook(int bits) {
  static const std::array<Codebook, 8> kBooks = [] {
    FloatEnv env;  // whoever asks first: the books are everybody's
    return gaussCodebooks();
  }();
  return kBooks[bits - 1];
}

// The reference of the rotation, to be read next to FORMAT.md "Rotation".

namespace {

constexpr size_t kLanes = 16;
constexpr size_t kRows = 32;
constexpr size_t kBlock = kLanes * kRows;

void changeSigns(float* block, uint32_t turn) {
  for (size_t e = 0; e < kBlock; ++e) {
    const uint32_t sign = (kRotationSigns[e % kLanes] ^ turn) >> e / kLanes & 1;
    block[e] = floatOf(floatBits(block[e]) ^ sign << 31);
  }
}

// Sums and differences of elements `apart`, a power of two.
void butterflies(float* block, size_t apart) {
  for (size_t e = 0; e < kBlock; ++e) {
    if (e & apart) continue;
    const float a = block[e], b = block[e + apart];
    block[e] = a + b;
    block[e + apart] = a - b;
  }
}

void transform(float* block, size_t rows, bool units) {
  for (size_t h = 1; h < rows; h *= 2)
    butterflies(block, h * kLanes);
  for (size_t e = 0; e < kBlock; ++e)
    block[e] *= rotationScale(static_cast<int>(rows), units);
  for (size_t h = 1; units && h < kLanes; h *= 2)
    butterflies(block, h);
}

template <size_t kTogether>
bool rotate(float* y, const float* x, size_t count, Blocks blocks) {
  bool taken = true;
  for (size_t at = 0; at < count; at += kBlock) {
    const size_t n = std::min(kBlock, count - at);
    float block[kBlock] = {};
    std::copy_n(x + at, n, block);
    for (float value : block)
      taken &= (floatBits(value) & 0x7fffffffu) < floatBits(kRotatedLimit);
    changeSigns(block, turnAt(blocks, at / kBlock));
    transform(block, kTogether, blocks.units);
    std::copy_n(block, kTogether == kRows ? kBlock : n, y + at);
  }
  return taken;
}

template <size_t kTogether, bool kAdd>
void unrotate(float* y, const float* x, size_t count, Blocks blocks) {
  for (size_t at = 0; at < count; at += kBlock) {
    const size_t n = std::min(kBlock, count - at);
    float block[kBlock] = {};
    std::copy_n(x + at, kTogether == kRows ? kBlock : n, block);
    transform(block, kTogether, blocks.units);
    changeSigns(block, turnAt(blocks, at / kBlock));
    for (size_t i = 0; i < n; ++i)
      y[at + i] = kAdd ? y[at + i] + block[i] : block[i];
  }
}

#define LOWCOMM_UNROTATE(rows) {unrotate<rows, false>, unrotate<rows, true>}

}  // namespace

namespace scalar {
constexpr RotationLoops kRotation = {{rotate<1>, rotate<2>, rotate<4>, rotate<8>, rotate<16>, rotate<32>},
                                     {LOWCOMM_UNROTATE(1), LOWCOMM_UNROTATE(2), LOWCOMM_UNROTATE(4),
                                      LOWCOMM_UNROTATE(8), LOWCOMM_UNROTATE(16), LOWCOMM_UNROTATE(32)}};
}  // namespace scalar

}  // namespace lowcomm
