// A grid codec whose buckets and rotations begin anew at every unit (FORMAT.md, "Units"): what a receiver decodes of
// one token or sample does not depend on any other, so that a model cannot learn to read it from there. A unit is cut
// into parts, whole buckets first and then shorter ones. Each part of all units together is a tensor of its own, which
// is coded as any other, with buckets and rotations that end with the unit; only a block of codes may hold several.
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "base/float_env.h"
#include "codec/change.h"
#include "codec/float_codec.h"
#include "codec/grid.h"
#include "codec/grid_change.h"
#include "codec/nonfinite.h"

namespace lowcomm {
namespace {

constexpr uint64_t kCached = 1024;  // elements that are gathered at a time
constexpr uint64_t kStep = 4096;    // or more of a step of a walk
constexpr uint64_t kAhead = 768;    // as loops over grids prefetch
constexpr int kPartsApart = 40;     // part i draws as a tensor does from its element i·2^40 on

// The loops over a run ask for as many elements kAhead further on. This asks for those that lie so far ahead of what is
// left of the unit, `count` elements from x on, or they would come late, unit by unit.
void fetchRest(Elements x, uint64_t count) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(x.data) + kAhead * itemBytes(x.dtype);
  fetch({reinterpret_cast<const void*>(at), x.dtype}, count);
}

struct Part {
  uint64_t at, size;  // elements of a unit
  GridCodec codec;
  uint64_t first;
};

std::vector<Part> partsOf(const CodecSpec& spec, const KernelTable& table) {
  CodecSpec flat = spec;
  flat.unit = 0;
  const uint64_t filled = (spec.unit + kCodeLanes - 1) / kCodeLanes * kCodeLanes;
  std::vector<Part> parts;
  uint64_t at = 0;
  const auto take = [&](uint64_t size, uint32_t bucket) {
    parts.push_back({at, size, GridCodec(flat, table, bucket), parts.size() << kPartsApart});
    at += size;
  };
  if (filled >= spec.bucket) take(filled / spec.bucket * spec.bucket, spec.bucket);
  while (at < filled) {
    const uint64_t size = std::bit_floor(filled - at);
    take(size, static_cast<uint32_t>(size));
  }
  return parts;
}

}  // namespace

class UnitCodec final : public FloatCodec, public ChangeCodec {
 public:
  UnitCodec(const CodecSpec& spec, const KernelTable& table) : FloatCodec(spec, table), parts_(partsOf(spec, table)) {}

  uint64_t granularity() const override { return kUncut; }

  size_t encodedBytes(uint64_t count, DType dtype) const override {
    if (count % spec().unit != 0) {
      throw ValueError(name() + ": elements: expected a multiple of the unit, " + std::to_string(spec().unit) +
                       ", got " + std::to_string(count));
    }
    size_t bytes = 0;
    for (const Part& part : parts_)
      bytes += part.codec.encodedBytes(count / spec().unit * part.size, dtype);
    return bytes;
  }

  std::unique_ptr<Change> changeEncoder(std::span<std::byte> dst, uint64_t first, uint64_t count,
                                        const Draws& draws) const override;
  std::unique_ptr<Change> changeDecoder(std::span<const std::byte> src, uint64_t first, uint64_t count) const override;

 private:
  friend class UnitChange;
  using Payloads = std::vector<GridCodec::Payload>;  // a part's each

  Payloads payloadsOf(std::span<const std::byte> payload, uint64_t count) const {
    Payloads payloads;
    auto* at = const_cast<std::byte*>(payload.data());  // which a decoder only reads
    for (const Part& part : parts_) {
      payloads.push_back({at, part.first, count / spec().unit * part.size});
      at += part.codec.encodedBytes(payloads.back().count, DType::float32);
    }
    return payloads;
  }

  // payloadsOf(), after setting the bytes between metadata and codes to 0.
  Payloads cleared(std::span<std::byte> payload, uint64_t count) const {
    const Payloads payloads = payloadsOf(payload, count);
    for (size_t i = 0; i < parts_.size(); ++i) {
      const size_t meta = parts_[i].codec.metaBytes(payloads[i].count);
      std::memset(payloads[i].bytes + meta, 0, up64(meta) - meta);
    }
    return payloads;
  }

  // Units of a step of a walk: after them every part ends a block.
  uint64_t unitsOfStep() const {
    const uint64_t least = std::max<uint64_t>(1, kCodeBlock / (parts_.back().size & -parts_.back().size));
    return std::max<uint64_t>(1, kStep / (least * spec().unit)) * least;
  }

  // Goes through `count` elements, some units at a time, so that all parts of short ones are in the cache together. Of
  // a part of whole blocks calls there(i, at, of, n), unit by unit: n elements from the part's element `at` on are the
  // tensor's from `of` on. Of others, and where not `direct`, gathered(i, at, n). n is at most kCached, or a bucket.
  // False, and no further, where one of these is false.
  template <typename There, typename Gathered>
  bool walk(uint64_t count, bool direct, const There& there, const Gathered& gathered) const {
    const uint64_t unit = spec().unit, units = count / unit, step = unitsOfStep();
    for (uint64_t first = 0; first < units; first += step) {
      const uint64_t end = std::min(units, first + step);
      for (size_t i = 0; i < parts_.size(); ++i) {
        const Part& part = parts_[i];
        const uint64_t most = std::max(kCached, part.codec.granularity());
        if (direct && part.size % kCodeBlock == 0 && part.at + part.size <= unit) {
          for (uint64_t u = first; u < end; ++u) {
            for (uint64_t in = 0; in < part.size; in += most) {
              const uint64_t n = std::min(most, part.size - in);
              if (!there(i, u * part.size + in, u * unit + part.at + in, n)) return false;
            }
          }
          continue;
        }
        for (uint64_t at = first * part.size; at < end * part.size; at += most) {
          if (!gathered(i, at, std::min(most, end * part.size - at))) return false;
        }
      }
    }
    return true;
  }

  // Elements of a unit behind those of part i, if its run ends before element `end` of the tensor; else 0.
  uint64_t restBehind(size_t i, uint64_t end) const {
    const uint64_t inside = end % spec().unit;
    return inside == parts_[i].at + parts_[i].size ? spec().unit - inside : 0;
  }

  // Memory for what `walk` takes at a time.
  std::vector<float> room() const { return std::vector<float>(std::max(kCached, parts_.front().codec.granularity())); }

  // Calls use(at, of, run, there) for the runs of a part's elements [at, at + n): run elements, of which `there` are
  // the tensor's from its element `of` on, and the rest fills the unit up.
  template <typename Use>
  void runs(const Part& part, uint64_t at, uint64_t n, const Use& use) const {
    for (uint64_t done = 0; done < n;) {
      const uint64_t unit = (at + done) / part.size, inside = (at + done) % part.size;
      const uint64_t run = std::min(part.size - inside, n - done), from = part.at + inside;
      use(done, unit * spec().unit + from, run, std::min(run, spec().unit - from));
      done += run;
    }
  }

  void gather(float* to, const void* src, DType dtype, const Part& part, uint64_t at, uint64_t n) const {
    runs(part, at, n, [&](uint64_t done, uint64_t of, uint64_t run, uint64_t there) {
      const Elements x = further({src, dtype}, of);
      if (dtype == DType::float32) {
        std::memcpy(to + done, x.data, there * sizeof(float));
      } else {
        widened(table(), x, there, to + done);
      }
      std::fill(to + done + there, to + done + run, to[done + there - 1]);
    });
  }

  void scatter(void* dst, DType dtype, const Part& part, const float* values, uint64_t at, uint64_t n) const {
    runs(part, at, n, [&](uint64_t done, uint64_t of, uint64_t, uint64_t there) {
      void* y = further(State{dst, dtype}, of).data;
      if (dtype == DType::float32) {
        std::memcpy(y, values + done, there * sizeof(float));
      } else {
        narrowing(dtype)(static_cast<uint16_t*>(y), values + done, there);
      }
    });
  }

  bool encodeTaken(std::span<std::byte> dst, const void* src, DType dtype, uint64_t, uint64_t count,
                   const PhiloxKey& key) const override {
    const Payloads payloads = cleared(dst, count);
    std::vector<float> values = room(), rotated = isRotated(spec()) ? room() : std::vector<float>();
    const auto encode = [&](size_t i, uint64_t at, const Piece& piece, uint64_t n) {
      return parts_[i].codec.encodeAt(payloads[i], at, piece, n, rotated.data(), key);
    };
    const auto there = [&](size_t i, uint64_t at, uint64_t of, uint64_t n) {
      const float* x = static_cast<const float*>(src) + of;
      fetchRest({x + n, DType::float32}, restBehind(i, of + n));
      const uintptr_t soon = reinterpret_cast<uintptr_t>(x) + kAhead * sizeof(float);
      return encode(i, at, {x, reinterpret_cast<const void*>(soon)}, n);
    };
    const auto gathered = [&](size_t i, uint64_t at, uint64_t n) {
      gather(values.data(), src, dtype, parts_[i], at, n);
      return encode(i, at, {values.data(), nullptr}, n);
    };
    {
      FloatEnv env;
      if (walk(count, dtype == DType::float32, there, gathered)) return true;
    }
    if (spec().nonfinite == Nonfinite::error) return false;
    for (size_t i = 0; i < parts_.size(); ++i) {
      std::vector<float> whole(payloads[i].count);
      gather(whole.data(), src, dtype, parts_[i], 0, whole.size());
      const GridCodec& codec = parts_[i].codec;
      codec.encode({payloads[i].bytes, codec.encodedBytes(whole.size(), DType::float32)}, whole.data(), DType::float32,
                   parts_[i].first, whole.size(), {key.seed, key.stream, key.step});
    }
    return true;
  }

  void checkPayload(std::span<const std::byte> src, uint64_t count) const override {
    expectBytes<WireError>(name(), encodedBytes(count, DType::float32), src.size());
    const Payloads payloads = payloadsOf(src, count);
    for (size_t i = 0; i < parts_.size(); ++i) {
      const GridCodec& codec = parts_[i].codec;
      codec.checkPayload({payloads[i].bytes, codec.encodedBytes(payloads[i].count, DType::float32)}, payloads[i].count);
    }
  }

  // Calls take(part, values, at, n) for what is decoded and lies apart; the rest is decoded to its place.
  template <typename Take>
  void decodeParts(float* direct, std::span<const std::byte> src, uint64_t count, const Take& take) const {
    const Payloads payloads = payloadsOf(src, count);
    std::vector<float> values = room();
    const auto there = [&](size_t i, uint64_t at, uint64_t of, uint64_t n) {
      fetchRest({direct + of + n, DType::float32}, restBehind(i, of + n));
      parts_[i].codec.decodeAt(direct + of, payloads[i], at, n);
      return true;
    };
    walk(count, direct != nullptr, there, [&](size_t i, uint64_t at, uint64_t n) {
      parts_[i].codec.decodeAt(values.data(), payloads[i], at, n);
      take(parts_[i], values.data(), at, n);
      return true;
    });
  }

  void decodeTo(void* dst, DType dtype, std::span<const std::byte> src, uint64_t count) const override {
    decodeParts(dtype == DType::float32 ? static_cast<float*>(dst) : nullptr, src, count,
                [&](const Part& part, const float* values, uint64_t at, uint64_t n) {
                  scatter(dst, dtype, part, values, at, n);
                });
  }

  void addTo(float* acc, std::span<const std::byte> src, uint64_t count) const override {
    decodeParts(nullptr, src, count, [&](const Part& part, const float* values, uint64_t at, uint64_t n) {
      runs(part, at, n, [&](uint64_t done, uint64_t of, uint64_t, uint64_t there) {
        table().sum(acc + of, acc + of, values + done, there);
      });
    });
  }

  std::vector<Part> parts_;
};

// Deltas: of parts of whole blocks where they are, of others gathered.
class UnitChange final : public Change {
 public:
  UnitChange(const UnitCodec& codec, const UnitCodec::Payloads& payloads, const Draws& draws)
      : codec_(codec), table_(codec.table()), x_(codec.room()), m_(codec.room()) {
    for (size_t i = 0; i < payloads.size(); ++i) {
      const auto& own = payloads[i];
      deltas_.emplace_back(codec.parts_[i].codec, own.bytes, own.first, own.count, draws);
    }
  }

  uint64_t piece() const override { return codec_.unitsOfStep() * codec_.spec().unit; }

  bool encode(const float* x, Elements before, State after, uint64_t count) override {
    return each(before, after, count, x,
                [&](size_t i, const float* from, float*, const float* m, float* to, uint64_t n) {
                  return deltas_[i].encode(from, m, to, n);
                });
  }

  void decode(float* y, Elements before, State after, uint64_t count) override {
    each(before, after, count, y, [&](size_t i, const float*, float* out, const float* m, float* to, uint64_t n) {
      deltas_[i].decode(out, to, m, n);
      return true;
    });
  }

 private:
  // Calls use(part, x, y, m, m's next, n): X is const float where x is read, float where y is written.
  template <typename X, typename Use>
  bool each(Elements before, State after, uint64_t count, X* x, const Use& use) {
    constexpr bool kReads = std::is_const_v<X>;
    const bool wide = after.dtype == DType::float32;
    const auto there = [&](size_t i, uint64_t, uint64_t of, uint64_t n) {
      const float* m = widened(table_, further(before, of), n, m_.data());
      float* to = wide ? static_cast<float*>(further(after, of).data) : m_.data();
      fetchRest({x + of + n, DType::float32}, codec_.restBehind(i, of + n));
      fetchRest(further(before, of + n), codec_.restBehind(i, of + n));
      if (!use(i, x + of, const_cast<float*>(x) + of, m, to, n)) return false;
      if (!wide) keep(table_, further(after, of), to, n);
      return true;
    };
    return codec_.walk(count, true, there, [&](size_t i, uint64_t at, uint64_t n) {
      const Part& part = codec_.parts_[i];
      if (kReads) codec_.gather(x_.data(), x, DType::float32, part, at, n);
      codec_.gather(m_.data(), before.data, before.dtype, part, at, n);
      if (!use(i, x_.data(), x_.data(), m_.data(), m_.data(), n)) return false;
      if constexpr (!kReads) codec_.scatter(x, DType::float32, part, x_.data(), at, n);
      codec_.runs(part, at, n, [&](uint64_t done, uint64_t of, uint64_t, uint64_t size) {
        keep(table_, further(after, of), m_.data() + done, size);
      });
      return true;
    });
  }

  const UnitCodec& codec_;
  const KernelTable& table_;
  std::vector<GridDelta> deltas_;
  std::vector<float> x_, m_;
};

std::unique_ptr<Change> UnitCodec::changeEncoder(std::span<std::byte> dst, uint64_t first, uint64_t count,
                                                 const Draws& draws) const {
  if (spec().bucket > kChangePiece || !begin(dst, DType::float32, first, count)) return nullptr;
  return std::make_unique<UnitChange>(*this, cleared(dst, count), draws);
}

std::unique_ptr<Change> UnitCodec::changeDecoder(std::span<const std::byte> src, uint64_t first, uint64_t count) const {
  if (spec().bucket > kChangePiece || count == 0) return nullptr;
  checkRun(DType::float32, first);
  checkPayload(src, count);
  return std::make_unique<UnitChange>(*this, payloadsOf(src, count), Draws{});
}

std::shared_ptr<const Codec> makeUnitCodec(const CodecSpec& spec, const KernelTable& table) {
  return std::make_shared<UnitCodec>(spec, table);
}

}  // namespace lowcomm
