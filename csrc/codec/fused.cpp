#include "codec/fused.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/float_env.h"
#include "base/narrow_float.h"
#include "codec/nonfinite.h"
#include "codec/pieces.h"
#include "kernels/cast/cast.h"
#include "kernels/isa/table.h"

namespace lowcomm {
namespace {

// Not inlined: the control register must be set before the first division (base/float_env.h).
__attribute__((noinline)) void divide(float* x, float divisor, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i)
    x[i] = x[i] / divisor;
}

// x where it is finite, else what stands at `otherwise`, or 0 without.
void keepFinite(float* x, const float* otherwise, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) {
    if ((floatBits(x[i]) & 0x7f800000u) == 0x7f800000u) x[i] = otherwise ? otherwise[i] : 0;
  }
}

}  // namespace

bool staysFinite(const CodecSpec& codec) {
  const PlainFamily* plain = plainFamily(codec.id);
  return codec.nonfinite == Nonfinite::error && (plain == nullptr || plain->nonfinite);
}

FusedCodec::FusedCodec(std::shared_ptr<const Codec> codec) : codec_(std::move(codec)) {
  if (codec_->spec().id == CodecId::none) {
    throw TypeError("fused codec: expected one that rounds its elements, got none");
  }
  changes_ = staysFinite(codec_->spec()) ? dynamic_cast<const ChangeCodec*>(codec_.get()) : nullptr;
}

void FusedCodec::check(std::initializer_list<DType> dtypes, size_t bytes, uint64_t count) const {
  for (DType dtype : dtypes) {
    if (!isCoded(dtype)) {
      throw TypeError(codec_->spec().str() + ": expected float32, float16 or bfloat16, got " + dtypeName(dtype));
    }
  }
  expectBytes<ValueError>(codec_->spec().str(), codec_->encodedBytes(count, DType::float32), bytes);
}

float* FusedCodec::room(std::vector<float>& memory, uint64_t count) {
  if (memory.size() < count) memory.resize(count);
  return memory.data();
}

// Elements [at, at + count) as floats, where they stand or in `memory`.
const float* FusedCodec::widened(Elements x, uint64_t at, uint64_t count, std::vector<float>& memory) {
  float* place = x.dtype == DType::float32 ? nullptr : room(memory, count);
  return lowcomm::widened(kernels(), further(x, at), count, place);
}

void FusedCodec::write(State to, const float* x, uint64_t at, uint64_t count) {
  if (to.dtype == DType::float32) {
    std::copy_n(x, count, static_cast<float*>(to.data) + at);
    return;
  }
  const auto narrow = to.dtype == DType::float16 ? kernels().float_to_float16 : kernels().float_to_bfloat16;
  narrow(static_cast<uint16_t*>(to.data) + at, x, count);
}

// As write, held to what a state of that type can go on from.
void FusedCodec::keep(State to, float* x, uint64_t at, uint64_t count) {
  lowcomm::keep(kernels(), further(to, at), x, count);
}

void FusedCodec::encodeDelta(std::span<std::byte> dst, Elements x, Elements before, State after, uint64_t first,
                             uint64_t count, const Draws& draws) {
  check({x.dtype, before.dtype, after.dtype}, dst.size(), count);
  checkMemory(before, after);
  FloatEnv env;
  if (encodeInOnePass(dst, x, before, after, first, count, draws)) return;
  const auto difference = [&](uint64_t at, uint64_t n) {
    float* work = room(work_, n);
    kernels().difference(work, widened(x, at, n, work_), widened(before, at, n, other_), n);
    return Piece{work, further(x, at + n).data};
  };
  codec_->encodeMade(dst, difference, first, count, draws);
  advance(dst, std::nullopt, before, after, first, count);
}

void FusedCodec::decodeDelta(std::span<const std::byte> src, State y, Elements before, State after, uint64_t first,
                             uint64_t count) {
  check({y.dtype, before.dtype, after.dtype}, codec_->encodedBytes(count, DType::float32), count);
  checkMemory(before, after);
  FloatEnv env;
  if (decodeInOnePass(src, y, before, after, first, count)) return;
  checkPayload(src, count);
  advance(src, y, before, after, first, count);
}

// False where the codec has no loops for it, or has met an element that it refuses: the loops for all codecs then say
// which one.
bool FusedCodec::encodeInOnePass(std::span<std::byte> dst, Elements x, Elements before, State after, uint64_t first,
                                 uint64_t count, const Draws& draws) {
  const auto encoder = changes_ ? changes_->changeEncoder(dst, first, count, draws) : nullptr;
  if (!encoder) return false;
  const uint64_t piece = x.dtype == DType::float32 ? count : encoder->piece();
  bool taken = true;
  for (uint64_t at = 0; taken && at < count; at += piece) {
    const uint64_t n = std::min(piece, count - at);
    taken = encoder->encode(widened(x, at, n, work_), further(before, at), further(after, at), n);
  }
  return taken;
}

bool FusedCodec::decodeInOnePass(std::span<const std::byte> src, State y, Elements before, State after, uint64_t first,
                                 uint64_t count) {
  const auto decoder = changes_ ? changes_->changeDecoder(src, first, count) : nullptr;
  if (!decoder) return false;
  const bool wide = y.dtype == DType::float32;
  const uint64_t piece = wide ? count : decoder->piece();
  for (uint64_t at = 0; at < count; at += piece) {
    const uint64_t n = std::min(piece, count - at);
    float* out = wide ? static_cast<float*>(y.data) + at : room(work_, n);
    decoder->decode(out, further(before, at), further(after, at), n);
    if (!wide) write(y, out, at, n);
  }
  return true;
}

void FusedCodec::checkMemory(Elements before, State after) const {
  if (before.dtype == after.dtype) return;
  throw TypeError(codec_->spec().str() + ": memory of one type: expected " + dtypeName(before.dtype) + ", got " +
                  dtypeName(after.dtype));
}

// after = before + decode(payload), and y the same sum, piece by piece.
void FusedCodec::advance(std::span<const std::byte> payload, std::optional<State> y, Elements before, State after,
                         uint64_t first, uint64_t count) {
  const bool finite = staysFinite(codec_->spec()), wide = after.dtype == DType::float32;
  const bool in_place = finite && wide && after.data == before.data;
  for (Pieces piece(*codec_, count); piece.more(); piece.next()) {
    const uint64_t at = piece.at(), n = piece.size();
    float* sum = in_place ? static_cast<float*>(after.data) + at : room(work_, n);
    const float* was = sum;
    if (finite && !wide) {
      widened(before, at, n, work_);
    } else if (!in_place) {
      was = widened(before, at, n, other_);
      std::copy_n(was, n, sum);
    }
    codec_->decodeAdd(sum, DType::float32, piece.get(payload, payload_), first + at, n);
    if (y) write(*y, sum, at, n);
    if (!finite) keepFinite(sum, was, n);
    if (!in_place) keep(after, sum, at, n);
  }
}

void FusedCodec::encodeFeedback(std::span<std::byte> dst, Elements g, State e, uint64_t first, uint64_t count,
                                const Draws& draws) {
  check({g.dtype, e.dtype}, dst.size(), count);
  FloatEnv env;
  const auto sum = [&](uint64_t at, uint64_t n) {
    float* work = room(work_, n);
    kernels().sum(work, widened(g, at, n, work_), widened({e.data, e.dtype}, at, n, other_), n);
    return Piece{work, further(g, at + n).data};
  };
  codec_->encodeMade(dst, sum, first, count, draws);
  const bool finite = staysFinite(codec_->spec());
  // The sum a second time: it was not kept, and the state is still what it was made of.
  for (Pieces piece(*codec_, count); piece.more(); piece.next()) {
    const float* y = sum(piece.at(), piece.size()).x;
    float* decoded = room(decoded_, piece.size());
    codec_->decode(decoded, DType::float32, piece.get(dst, payload_), first + piece.at(), piece.size());
    const bool wide = e.dtype == DType::float32;
    float* left = wide ? static_cast<float*>(e.data) + piece.at() : decoded;
    kernels().difference(left, y, decoded, piece.size());
    if (!finite) keepFinite(left, nullptr, piece.size());
    if (!wide) keep(e, decoded, piece.at(), piece.size());
  }
}

// Checks the parts of a whole payload that its pieces do not contain: its size and the padding of its metadata.
void FusedCodec::checkPayload(std::span<const std::byte> payload, uint64_t count) const {
  const std::string name = codec_->spec().str();
  expectBytes<WireError>(name, codec_->encodedBytes(count, DType::float32), payload.size());
  if (const auto head = codec_->headBytes(count, DType::float32)) {
    expectZero(payload.subspan(*head, up64(*head) - *head), name, "metadata padding");
  }
}

void FusedCodec::encodeSum(std::span<std::byte> dst, void* out, DType dtype,
                           std::span<const Contribution> contributions, int average_over, uint64_t first,
                           uint64_t count, const Draws& draws, float* lost) {
  check({dtype}, dst.size(), count);
  if (contributions.empty()) {
    throw ValueError(codec_->spec().str() + ": contributions to a sum: expected 1 or more, got 0");
  }
  for (const Contribution& c : contributions) {
    if (!c.own) checkPayload(c.payload, count);
  }
  FloatEnv env;
  const auto addContribution = [&](const Contribution& c, const Pieces& piece, float* sum, bool starts) {
    if (c.own) {
      const DType type = c.own_type == DType::opaque ? dtype : c.own_type;
      const float* own = widened({c.own, type}, piece.at(), piece.size(), other_);
      if (starts) {
        std::copy_n(own, piece.size(), sum);
      } else {
        kernels().sum(sum, sum, own, piece.size());
      }
      return;
    }
    const auto payload = piece.get(c.payload, payload_);
    try {
      if (starts) {
        codec_->decode(sum, DType::float32, payload, first + piece.at(), piece.size());
      } else {
        codec_->decodeAdd(sum, DType::float32, payload, first + piece.at(), piece.size());
      }
    } catch (const WireError&) {  // whose message counts in the piece: the whole payload's says where it is
      codec_->decode(std::vector<float>(count).data(), DType::float32, c.payload, first, count);
      throw;
    }
  };
  for (Pieces piece(*codec_, count); piece.more(); piece.next()) {
    float* sum = room(work_, piece.size());
    for (const Contribution& c : contributions)
      addContribution(c, piece, sum, &c == contributions.data());
    if (average_over > 0) divide(sum, static_cast<float>(average_over), piece.size());

    const std::span<std::byte> own = piece.room(dst, payload_);
    codec_->encode(own, sum, DType::float32, first + piece.at(), piece.size(), draws);
    piece.put(dst, own);
    codec_->decode(static_cast<std::byte*>(out) + piece.at() * itemBytes(dtype), dtype, own, first + piece.at(),
                   piece.size());
    if (!lost) continue;
    float* left = lost + piece.at();
    kernels().difference(left, sum, widened({out, dtype}, piece.at(), piece.size(), decoded_), piece.size());
    for (uint64_t i = 0; average_over > 1 && i < piece.size(); ++i)
      left[i] *= static_cast<float>(average_over);
    keepFinite(left, nullptr, piece.size());  // a sum may be beyond the largest number of `dtype`
  }
}

}  // namespace lowcomm
