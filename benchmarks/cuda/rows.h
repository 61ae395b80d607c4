#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "device.h"
#include "kernels/noise/noise.h"

namespace lowcomm {

struct Row {
  std::string codec, dtype, loop;
  Measurement measured;
  double bound;  // percent
  bool same;     // bytes or values as on the host

  bool pass() const { return same && measured.median >= bound; }
};

struct Options {
  size_t mib = 256;
  int repetitions = 21;
  std::string only, json;
};

// Each appends its rows. Throw std::runtime_error where the device does.

// Encode, decode and decode-add of a grid codec, a cast or a scalar codec.
void measureCodec(std::vector<Row>& rows, const std::string& text, DType dtype, const Options& options);

// Operations that are fused with a grid codec, of fp32 elements and states: a state is read and written with each, and
// a sum is of own elements and three payloads.
void measureFused(std::vector<Row>& rows, const std::string& text, const Options& options);

// x += the sum of `terms` perturbations of a seed each.
void measureNoise(std::vector<Row>& rows, Noise noise, size_t terms, double bound, const Options& options);

// topk, axis=channel and bucket=tensor, of fp32 elements. Their encodes read the elements more than once, and topk's
// values go through its workspace, there and back: a row's bytes are what its kernels read and write. No bound stands
// for histograms, nor for the few chains that a tensor's sum has when it is one bucket.
void measureUncut(std::vector<Row>& rows, const std::string& text, const Options& options);

}  // namespace lowcomm
