// The reference: the loops of grid.cpp one after the other, a group at a time.
#include "kernels/change/change.h"

#include <algorithm>
#include <cstring>

#include "kernels/cast/cast.h"
#include "kernels/cast/cast_rules.h"
#include "kernels/isa/table.h"

namespace lowcomm {
namespace {

constexpr size_t kBlock = 512;

size_t metaBytes(size_t count, const GridForm& form, bool centred) {
  return count / form.bucket * (centred ? 1 : 2) * (form.bf16 ? 2 : 4);
}

size_t wordBytes(size_t count, int bits) {
  return count / 8 * static_cast<size_t>(bits);
}

size_t groupOf(const GridForm& form) {
  return std::max<size_t>(kBlock, form.bucket);
}

void decodeAt(float* y, const std::byte* meta, const std::byte* words, const GridForm& form, int bits, bool centred) {
  const auto& loops = centred ? scalar::kTable.decode_centred : scalar::kTable.decode_grid;
  loops[bits - 1][1](y, meta, words, groupOf(form), form);
}

// A group of a memory as floats, and back.
void read(float* to, const void* memory, size_t at, size_t count, MemoryType type) {
  if (type == MemoryType::float32) {
    std::copy_n(static_cast<const float*>(memory) + at, count, to);
  } else {
    const auto* from = static_cast<const uint16_t*>(memory) + at;
    (type == MemoryType::float16 ? scalar::halvesToFloats : scalar::brainsToFloats)(to, from, count);
  }
}

void write(void* memory, const float* from, size_t at, size_t count, MemoryType type) {
  if (type == MemoryType::float32) {
    std::copy_n(from, count, static_cast<float*>(memory) + at);
    return;
  }
  const bool half = type == MemoryType::float16;
  const float largest = half ? kFloat16Largest : kBfloat16Largest;
  float held[kMostChangeBucket];
  for (size_t i = 0; i < count; ++i)
    held[i] = heldState(from[i], largest);
  auto* to = static_cast<uint16_t*>(memory) + at;
  (half ? scalar::floatsToHalves : scalar::floatsToBrains)(to, held, count);
}

template <MemoryType kType, GridRule kRule>
size_t encodeChange(std::byte* meta, std::byte* words, const float* x, const void* before, void* after, size_t count,
                    const GridForm& form, int bits, uint64_t block, const PhiloxKey& key) {
  constexpr bool kCentred = kRule == GridRule::centred || kRule == GridRule::sign;
  const auto encode = scalar::kTable.encode_grid[bits - 1][static_cast<size_t>(kRule)];
  const size_t group = groupOf(form);
  float change[kMostChangeBucket], memory[kMostChangeBucket];
  for (size_t at = 0; at < count; at += group) {
    read(memory, before, at, group, kType);
    for (size_t i = 0; i < group; ++i)
      change[i] = x[at + i] - memory[i];
    std::byte *to_meta = meta + metaBytes(at, form, kCentred), *to_words = words + wordBytes(at, bits);
    if (!encode(to_meta, to_words, change, group, form, block + at / kBlock, key)) return at;
    decodeAt(memory, to_meta, to_words, form, bits, kCentred);
    write(after, memory, at, group, kType);
  }
  return count;
}

template <MemoryType kType, bool kCentred>
void decodeChange(float* y, const void* before, void* after, const std::byte* meta, const std::byte* words,
                  size_t count, const GridForm& form, int bits) {
  const size_t group = groupOf(form);
  for (size_t at = 0; at < count; at += group) {
    read(y + at, before, at, group, kType);
    decodeAt(y + at, meta + metaBytes(at, form, kCentred), words + wordBytes(at, bits), form, bits, kCentred);
    write(after, y + at, at, group, kType);
  }
}

#define LOWCOMM_ENCODE_CHANGE(type)                                                                         \
  {encodeChange<MemoryType::type, GridRule::nearest>, encodeChange<MemoryType::type, GridRule::stochastic>, \
   encodeChange<MemoryType::type, GridRule::dithered>, encodeChange<MemoryType::type, GridRule::centred>,   \
   encodeChange<MemoryType::type, GridRule::sign>}
#define LOWCOMM_DECODE_CHANGE(type) {decodeChange<MemoryType::type, false>, decodeChange<MemoryType::type, true>}

}  // namespace

namespace scalar {
constexpr ChangeKernels kChanges = {
    {LOWCOMM_ENCODE_CHANGE(float32), LOWCOMM_ENCODE_CHANGE(float16), LOWCOMM_ENCODE_CHANGE(bfloat16)},
    {LOWCOMM_DECODE_CHANGE(float32), LOWCOMM_DECODE_CHANGE(float16), LOWCOMM_DECODE_CHANGE(bfloat16)}};
}  // namespace scalar

}  // namespace lowcomm
