#include "codecs.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <memory>
#include <random>

#include "base/narrow_float.h"
#include "codec/codec.h"
#include "codec/level_table.h"
#include "streams.h"

namespace lowcomm {
namespace {

volatile uint32_t sink;

// Levels as a gradient's are learned: closer where values are frequent, in the middle.
LevelTable learned(int bits) {
  std::vector<float> values(size_t{1} << bits);
  const auto top = static_cast<double>(values.size() - 1);
  for (size_t i = 0; i < values.size(); ++i) {
    const double t = 2 * static_cast<double>(i) / top - 1;
    values[i] = static_cast<float>(0.5 + 0.25 * (t + t * t * t));
  }
  return LevelTable(values);
}

class Bench {
 public:
  explicit Bench(const Options& options)
      : repetitions_(options.repetitions),
        pieces_(std::max<size_t>(1, (options.mib << 18) / kPiece)),
        x_(allocate<float>(count())),
        y_(allocate<float>(count())),
        half_(allocate<uint16_t>(count())),
        payload_(allocate<std::byte>(2 * count())) {
    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    const size_t fresh = std::min(count(), size_t{1} << 20);
    for (size_t i = 0; i < fresh; ++i)
      x_[i] = normal(generator);
    for (size_t i = fresh; i < count(); ++i)
      x_[i] = x_[i - fresh];
  }

  size_t count() const { return pieces_ * kPiece; }

  void measure(Row& row) {
    std::shared_ptr<const Codec> held = makeCodec(row.spec, *row.form);
    if (needsTable(row.spec)) held = held->with(learned(row.spec.bits));
    const Codec& codec = *held;
    const size_t unit = std::max<uint64_t>(1, row.spec.unit);
    const size_t piece = kPiece / unit * unit;
    const size_t bytes = codec.encodedBytes(piece, row.dtype);
    narrow(row.dtype);
    const auto encode = [&](size_t i) {
      codec.encode({payload_.get() + i * bytes, bytes}, source(row.dtype, i * piece), row.dtype, 0, piece,
                   {1, 2, static_cast<uint32_t>(i)});
    };
    const auto decode = [&](size_t i) {
      std::memset(y_.get() + i * piece, 0, row.loop == Loop::add ? piece * 4 : 0);
      codec.decode(target(row.dtype, i * piece), row.dtype, {payload_.get() + i * bytes, bytes}, 0, piece);
    };
    const auto add = [&](size_t i) {
      codec.decodeAdd(y_.get() + i * piece, row.dtype, {payload_.get() + i * bytes, bytes}, 0, piece);
    };

    for (size_t i = 0; i < pieces_; ++i) {
      encode(i);
      decode(i);
    }
    row.error = error(row.dtype, piece);
    row.bits = 8.0 * static_cast<double>(bytes) / static_cast<double>(piece);
    row.elements = pieces_ * piece;
    const auto loop = row.loop == Loop::encode   ? std::function<void(size_t)>(encode)
                      : row.loop == Loop::decode ? std::function<void(size_t)>(decode)
                                                 : std::function<void(size_t)>(add);
    if (row.loop == Loop::add) std::memset(y_.get(), 0, count() * 4);
    Fastest own(pieces_), bound(pieces_);
    for (int r = 0; r < repetitions_; ++r) {
      if (row.loop == Loop::encode) {
        bound.pass([&](size_t i) { sink = streams::read<false>(x_.get() + i * kPiece, kPiece); });
        bound.pass([&](size_t i) { sink = streams::read<true>(x_.get() + i * kPiece, kPiece); });
      } else {
        bound.pass([&](size_t i) { streams::addInPlace<false>(y_.get() + i * kPiece, kPiece, 1e-9f); });
        bound.pass([&](size_t i) { streams::addInPlace<true>(y_.get() + i * kPiece, kPiece, 1e-9f); });
      }
      own.pass(loop);
    }
    row.seconds = own.seconds();
    // An element of an encode moves its own bytes and its code's twice: a line is read before it is written. One of a
    // decode moves its own twice, as the addition does.
    const double item = row.dtype == DType::float32 || row.loop == Loop::add ? 4 : 2;
    const double code = row.spec.bits > 0 ? row.spec.bits : row.bits;
    row.bound_seconds = bound.seconds() * (row.loop == Loop::encode ? item + code / 4 : item) / 4;
  }

 private:
  void narrow(DType dtype) {
    if (dtype == DType::float32 || dtype == narrowed_) return;
    narrowed_ = dtype;
    for (size_t i = 0; i < count(); ++i)
      half_[i] = dtype == DType::float16 ? floatToFloat16(x_[i]) : floatToBfloat16(x_[i]);
  }

  const void* source(DType dtype, size_t at) const {
    return dtype == DType::float32 ? static_cast<const void*>(x_.get() + at) : half_.get() + at;
  }

  // 16-bit values are decoded into y's memory: half_ keeps the source.
  void* target(DType dtype, size_t at) const {
    return dtype == DType::float32 ? static_cast<void*>(y_.get() + at) : reinterpret_cast<uint16_t*>(y_.get()) + at;
  }

  double error(DType dtype, size_t piece) const {
    double difference = 0, norm = 0;
    for (size_t i = 0; i < piece; ++i) {
      uint16_t bits;
      std::memcpy(&bits, static_cast<const char*>(target(dtype, i)), 2);
      const double y = dtype == DType::float32   ? y_[i]
                       : dtype == DType::float16 ? float16ToFloat(bits)
                                                 : bfloat16ToFloat(bits);
      difference += (y - x_[i]) * (y - x_[i]);
      norm += double{x_[i]} * x_[i];
    }
    return std::sqrt(difference / norm);
  }

  int repetitions_;
  size_t pieces_;
  std::unique_ptr<float[], decltype(&std::free)> x_, y_;
  std::unique_ptr<uint16_t[], decltype(&std::free)> half_;
  std::unique_ptr<std::byte[], decltype(&std::free)> payload_;
  DType narrowed_ = DType::float32;
};

}  // namespace

void measureRows(const Options& options, std::vector<Row>& rows, const std::function<void(const Row&)>& done) {
  Bench bench(options);
  for (Row& row : rows) {
    bench.measure(row);
    done(row);
  }
}

std::vector<Row> rowsOf(const KernelTable* form) {
  std::vector<Row> rows;
  const auto add = [&](std::initializer_list<Loop> loops, const std::string& text, DType dtype = DType::float32) {
    for (Loop loop : loops)
      rows.emplace_back(form, loop, text, dtype);
  };
  const auto text = [](const char* name, int bits, const char* options = ":bucket=512") {
    return name + std::to_string(bits) + options;
  };
  static constexpr std::initializer_list<Loop> kAll = {Loop::encode, Loop::decode, Loop::add};
  static constexpr std::initializer_list<Loop> kThereAndBack = {Loop::encode, Loop::decode};
  for (const char* bucket : {":bucket=128", ":bucket=512", ":bucket=1024"}) {
    for (int bits : {2, 4, 8})
      add({Loop::encode}, text("minmax", bits, bucket));
  }
  for (int bits : {2, 4, 8})
    add({Loop::encode}, text("lattice", bits));
  for (int bits : {4, 8})
    add({Loop::encode}, text("qsgd", bits, ":bucket=1024"));
  for (Loop loop : {Loop::decode, Loop::add}) {
    for (int bits : {2, 4, 8})
      add({loop}, text("minmax", bits));
  }
  for (int bits : {2, 4, 8}) {
    for (const char* name : {"gauss", "levels"})
      add(kAll, text(name, bits));
    add(kAll, text("minmax", bits, ":bucket=512,rotate=1"));
  }
  // By token: widths of which the buckets are a part, and of which they are not.
  add({Loop::decode}, "minmax4:bucket=128");
  for (const char* name : {"gauss2:bucket=512", "gauss4:bucket=512", "minmax4:bucket=128"}) {
    for (const char* width : {",unit=1024", ",unit=576", ",unit=1600"})
      add(kThereAndBack, std::string(name) + width);
  }
  for (const char* name : {"qsgd", "sym"})
    add({Loop::encode}, text(name, 4, ":bucket=512,meta=bf16,rotate=1"));
  for (const char* other : {"sym4:bucket=512", "sym4:bucket=512,range=l2", "mid2:bucket=512", "sign1:bucket=512",
                            "fp16", "bf16", "topk:keep=0.01", "topk:chunk=4096,keep=64,values=sym2", "logbyte", "log9"})
    add(kAll, other);
  for (DType dtype : {DType::float16, DType::bfloat16}) {
    for (const char* half : {"minmax4:bucket=512", "gauss4:bucket=512", "sym8:bucket=512"})
      add(kThereAndBack, half, dtype);
  }
  return rows;
}

// The row of the same loop over elements without units, for one whose text has them.
static const Row* flatOf(const std::vector<Row>& rows, const Row& of) {
  const std::string text = of.text.substr(0, of.text.find(",unit="));
  for (const Row& r : rows) {
    if (text != of.text && r.text == text && r.form == of.form && r.loop == of.loop && r.dtype == of.dtype) return &r;
  }
  return nullptr;
}

namespace {

// The targets of one instruction set, as fractions of the bound.
struct Targets {
  const char* form;
  double nearest, nearest_small, stochastic, rotated, decode, add;
};
constexpr Targets kTargets[] = {{"avx2", .85, .78, .52, .40, .65, .72}, {"avx512", .90, .82, .66, .50, .70, .83}};

}  // namespace

std::vector<Gate> judge(const std::vector<Row>& rows) {
  std::vector<Gate> gates;
  for (const Row& row : rows) {
    const auto* t = std::find_if(std::begin(kTargets), std::end(kTargets),
                                 [&](const Targets& target) { return !std::strcmp(target.form, row.form->name); });
    if (t == std::end(kTargets) || row.dtype != DType::float32) continue;
    const std::string name = std::string(row.form->name) + " " + row.name();
    const double fraction = row.percent() / 100;
    const bool nearest = row.spec.id == CodecId::minmax && row.spec.axis == Axis::flat;
    if (row.text.find(",unit=") != std::string::npos) {
      if (const Row* flat = flatOf(rows, row))
        gates.push_back(
            {name + ", of the flat codec's", row.percent() / flat->percent(), row.spec.unit == 0 ? .9 : .75});
    } else if (isRotated(row.spec)) {  // what undoes a rotation has no target
      if (row.loop == Loop::encode) gates.push_back({name + ", of its bound", fraction, t->rotated});
    } else if (row.loop != Loop::encode) {
      if (nearest) gates.push_back({name + ", of in-place add", fraction, row.loop == Loop::add ? t->add : t->decode});
    } else if (row.spec.id == CodecId::qsgd) {
      gates.push_back({name + ", of its bound", fraction, t->stochastic});
    } else if (nearest || row.spec.id == CodecId::lattice) {
      gates.push_back({name + ", of its bound", fraction, row.spec.bucket >= 512 ? t->nearest : t->nearest_small});
    }
  }
  return gates;
}

}  // namespace lowcomm
