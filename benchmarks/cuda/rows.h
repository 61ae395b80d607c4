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

// Encode, decode and decode-add of a grid codec.
void measureCodec(std::vector<Row>& rows, const std::string& text, DType dtype, const Options& options);

// x += the sum of `terms` perturbations of a seed each.
void measureNoise(std::vector<Row>& rows, Noise noise, size_t terms, double bound, const Options& options);

}  // namespace lowcomm
