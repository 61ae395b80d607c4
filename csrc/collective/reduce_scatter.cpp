#include "collective/reduce_scatter.h"

#include <cstddef>
#include <iterator>
#include <span>
#include <string>
#include <vector>

#include "codec/none.h"
#include "codec/nonfinite.h"
#include "codec/repair.h"
#include "collective/describe.h"
#include "collective/exchange.h"
#include "kernels/finite.h"

namespace lowcomm {
namespace {

// One op's state: what to send, and the accumulation of what comes.
class Reducer {
 public:
  Reducer(OpContext& op, const std::vector<ScatterMessage>& messages, const Reduction& reduction)
      : op_(op), messages_(messages), reduction_(reduction) {}

  // A rank's own slice is not encoded, so no codec looks at it: a NaN there would reach the result unseen.
  void checkOwnSlice(size_t m, const Chunk& chunk) {
    const ScatterMessage& message = messages_[m];
    const int own = op_.group.rank();
    const std::string of = sliceFor(own);
    for (const Run& run : chunk.runs) {
      const CodecSpec& codec = run.codec->spec();
      if (codec.id == CodecId::none || codec.nonfinite != Nonfinite::error) continue;
      expectFinite(run.codec->spec(), contribution(message, run, own), message.dtype, run.at, run.count, of);
    }
  }

  void encode(size_t m, const Chunk& chunk, int peer, std::span<std::byte> payload) {
    const ScatterMessage& message = messages_[m];
    const uint32_t slice = static_cast<uint32_t>(peer * message.layout.segments().size());
    const std::string of = sliceFor(peer);
    size_t at = 0;
    for (const Run& run : chunk.runs) {
      run.encode(payload.subspan(at, run.bytes), contribution(message, run, peer), message.dtype,
                 message.draws.slot(slice + run.segment), of);
      at += run.bytes;
    }
  }

  void absorb(size_t m, const Chunk& chunk, const std::vector<std::span<const std::byte>>& payloads) {
    const ScatterMessage& message = messages_[m];
    const DType wide = accumulatorType(message.dtype);
    size_t at = 0;
    for (const Run& run : chunk.runs) {
      std::byte* sum = scratch(op_.group.accumulator, run.count * itemBytes(wide));
      for (int rank = 0; rank < op_.group.size(); ++rank) {
        if (rank == op_.group.rank()) {
          add(sum, ownContribution(message, run), message.dtype, run.count, rank == 0);
        } else {
          addReceived(sum, run, payloads[rank].subspan(at, run.bytes), message.dtype, rank);
        }
      }
      reduceFinish(static_cast<std::byte*>(message.output) + run.at * itemBytes(message.dtype), sum, message.dtype,
                   run.count, reduction_.average ? op_.group.size() : 0);
      at += run.bytes;
    }
  }

 private:
  static std::string sliceFor(int rank) { return "of the slice for rank " + std::to_string(rank); }

  static std::byte* scratch(std::vector<std::byte>& memory, size_t bytes) {
    if (memory.size() < bytes) memory.resize(bytes);
    return memory.data();
  }

  // This rank's elements of `run` for `peer`, premultiplied where the reduction says so.
  const void* contribution(const ScatterMessage& message, const Run& run, int peer) {
    const size_t item = itemBytes(message.dtype);
    const void* input = static_cast<const std::byte*>(message.inputs[peer]) + run.at * item;
    if (!reduction_.premultiplied) return input;
    std::byte* scaled = scratch(op_.group.scaled, run.count * item);
    scale(scaled, input, message.dtype, reduction_.premultiply, run.count);
    return scaled;
  }

  // This rank's elements of its own slice: as the others would see them where the codec saturates. A poisoned bucket's
  // NaN and infinities reach the sum as they are.
  const void* ownContribution(const ScatterMessage& message, const Run& run) {
    const void* x = contribution(message, run, op_.group.rank());
    const CodecSpec& codec = run.codec->spec();
    const float limit = finiteLimit(codec);
    if (codec.nonfinite != Nonfinite::saturate || firstNonFinite(x, message.dtype, run.count, limit) < 0) return x;
    const auto* from = static_cast<const std::byte*>(x);
    repaired_.assign(from, from + run.count * itemBytes(message.dtype));
    saturate(repaired_.data(), message.dtype, run.count, codec.bucket, limit);
    return repaired_.data();
  }

  void add(void* sum, const void* x, DType dtype, uint64_t count, bool first) {
    if (first) {
      reduceAssign(sum, x, dtype, count);
    } else {
      reduceInto(sum, x, dtype, reduction_.kind, count);
    }
  }

  // Exact elements are reduced where they stand, in their own type; a codec's are decoded into the fp32 sum.
  void addReceived(std::byte* sum, const Run& run, std::span<const std::byte> payload, DType dtype, int rank) {
    op_.blame(rank, [&] {
      const bool first = rank == 0;
      float* decoded = reinterpret_cast<float*>(sum);
      if (run.codec->spec().id == CodecId::none) {
        add(sum, NoneCodec::elements(dtype, payload, run.count).data(), dtype, run.count, first);
      } else if (first) {
        run.codec->decode(decoded, DType::float32, payload, run.offset, run.count);
      } else {
        run.codec->decodeAdd(decoded, dtype, payload, run.offset, run.count);
      }
    });
  }

  OpContext& op_;
  const std::vector<ScatterMessage>& messages_;
  const Reduction& reduction_;
  std::vector<std::byte> repaired_;
};

}  // namespace

void reduceScatter(OpContext& op, const std::vector<ScatterMessage>& messages, const Reduction& reduction) {
  Exchange exchange;
  for (const ScatterMessage& message : messages) {
    if (!reduceSupports(message.dtype, reduction.kind)) {
      throw TypeError(std::string("reduce_scatter: expected a dtype that ") + reduceName(reduction.kind) +
                      " takes, got " + dtypeName(message.dtype));
    }
    exchange.messages.push_back(planMessage(message.layout, message.dtype, op.group.chunk_bytes));
    exchange.messages.back().type_name = message.type_name;
    exchange.messages.back().type_elements = message.type_elements;
    op.counters.raw_bytes += exchange.messages.back().rawBytes() * (op.group.size() - 1);
  }
  exchange.description = describe(op.op, exchange.messages);
  // Before the codec, which follows from it.
  exchange.description.fields.insert(std::prev(exchange.description.fields.end()),
                                     {"reduce op", reduction.average         ? "avg"
                                                   : reduction.premultiplied ? "premul_sum"
                                                                             : reduceName(reduction.kind)});

  Reducer reducer(op, messages, reduction);
  exchange.check = [&](size_t m, const Chunk& chunk) { reducer.checkOwnSlice(m, chunk); };
  exchange.encode = [&](size_t m, const Chunk& chunk, int peer, std::span<std::byte> payload) {
    reducer.encode(m, chunk, peer, payload);
  };
  exchange.absorb = [&](size_t m, const Chunk& chunk, const std::vector<std::span<const std::byte>>& payloads) {
    reducer.absorb(m, chunk, payloads);
  };
  runExchange(op, exchange);
}

}  // namespace lowcomm
