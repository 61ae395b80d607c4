#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "diloco/diloco_options.h"
#include "engine/op_queue.h"
#include "tensor/compression.h"

namespace lowcomm {

// A tensor that an outer loop averages, under the name that its state has in a checkpoint. Of any device and floating
// dtype: what is not contiguous fp32 in host memory is copied there and back for an outer step, a CUDA fragment's
// parameters by one pinned buffer of their own types.
struct OuterParameter {
  std::string name;
  at::Tensor tensor;

  // Where the tensor is a box of a larger parameter, as a shard of FSDP2 is: the parameter's shape, and where the box
  // begins in it, by dimension. Empty: the tensor is all of it.
  std::vector<int64_t> whole = {}, offset = {};

  uint32_t number = 0;  // among all pieces of all ranks (SiteModel sets it): draws and summing are shared out by it
};

// The ranks of one site, which hold one model together. A part of the model is what some of them hold between them, as
// replicas, shards or both; the stages of a pipeline are parts. A default one is a rank by itself.
struct OuterSite {
  std::shared_ptr<OpQueue> ranks;  // null: this rank alone
  std::vector<int> parts;          // by rank: its part, 0, 1, …; empty: every rank has a part of its own
  std::vector<int> stripes;        // by part: its stripes (SiteModel); empty: as many as ranks hold it
};

// Where the pseudo-gradient δ and the mark of a message in flight stand, and its average once it has landed; the same
// for all tensors of a fragment. Of δ = θ̄ − θ and mark = θ one is kept, in `start`, and the other follows from it to
// the bit: in mode continue training goes on from θ̄ − δ, which is the mark; in mode restart from θ̄. Mode sync waits
// for the average, and takes δ from the parameters themselves. 16-bit parameters keep both: δ, and the mark in 2 bytes.
struct OuterLayout {
  bool start_is_delta = false;  // else the mark
  bool mark_is_outer = false;   // of fp32 parameters: the mark is θ̄ ...
  bool mark_is_apart = false;   // ... or stands in `mark`: mode restart with an alpha
  bool exact = false;           // no codec: δ, then the average, stands in `message`
  bool in_place = true;         // the average is in `message`, decoded: exact, of a group of one rank, or loaded
};

// Bytes of a rank's outer state, by what they hold.
struct OuterMemory {
  uint64_t outer = 0, momentum = 0, start = 0, mark = 0, average = 0, residual = 0, rounding = 0;

  static constexpr std::pair<const char*, uint64_t OuterMemory::*> kParts[] = {
      {"outer", &OuterMemory::outer},       {"momentum", &OuterMemory::momentum}, {"start", &OuterMemory::start},
      {"mark", &OuterMemory::mark},         {"average", &OuterMemory::average},   {"residual", &OuterMemory::residual},
      {"rounding", &OuterMemory::rounding},
  };

  uint64_t total() const { return outer + momentum + start + mark + average + residual + rounding; }
  OuterMemory& operator+=(const OuterMemory& more) {
    for (const auto& [name, part] : kParts)
      this->*part += more.*part;
    return *this;
  }
};

// One parameter and what an outer loop keeps of it in host memory, 4 bytes an element unless said; undefined tensors
// are not kept. One thread.
//
// Always:
//   outer, momentum   θ̄ and u, equal on all ranks; u not with μ = 0
//   compression       with a codec: with error feedback its residual, 1 byte in 8 bits; the factor of a matrix
//   rounding          parameters that are not fp32: what rounding θ to their type lost
// While a message is in flight, in addition:
//   start             δ or the mark (OuterLayout); not in mode sync
//   mark              where it does not follow: see OuterLayout
//   message           δ, then the average, where they are not in codes
struct OuterTensor {
  // Takes θ̄ from `wide`, the parameter in fp32.
  OuterTensor(OuterParameter parameter, const at::Tensor& wide, const DiLoCoXOptions& options);

  OuterParameter parameter;
  at::Tensor outer, momentum, start, mark, message, rounding;
  std::shared_ptr<Compression> compression;  // null: exact
  int64_t first_rank = 0;                    // r_1; 0: no factors

  // The elements [first, first + count), without message and mark; `host`: the parameter in fp32 in host memory.
  OuterSpan span(const at::Tensor& host, int64_t first, int64_t count) const;

  bool holdsDelta(const OuterLayout& layout) const;

  // The mark of the elements, where it stands or in `scratch`; may be written to.
  float* markOf(const OuterLayout& layout, int64_t first, int64_t count, float* scratch) const;

  // The same, in `scratch` if it stood in the start, which becomes δ.
  float* markApart(const OuterLayout& layout, int64_t first, int64_t count, float* scratch) const;

  // Writes the elements' δ to `delta`, which may be the start.
  void takeDelta(const OuterLayout& layout, float* delta, int64_t first, int64_t count) const;

  // Calls f(key, tensor) with what a checkpoint holds as it stands here, in addition to residuals and factors. Keys of
  // what is this rank's alone begin with "own.".
  void eachKept(const std::function<void(const std::string&, const at::Tensor&)>& f) const;

  OuterMemory memory() const;
};

// The elements of a tensor from number `first` on; null if it is not kept.
float* dataAt(const at::Tensor& tensor, int64_t first);

void copyElements(float* to, const float* from, int64_t count);  // which may be the same

}  // namespace lowcomm
