#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "codec/spec.h"
#include "kernels/dtype.h"
#include "kernels/table.h"
#include "timing.h"

namespace lowcomm {

// Encode, decode and decode-add of the grid codecs.
enum class Loop { encode, decode, add };
constexpr const char* kLoopNames[] = {"encode", "decode", "decode-add"};

struct Row {
  const KernelTable* form;
  Loop loop;
  std::string codec;
  int bits;
  uint32_t bucket;
  DType dtype = DType::float32;
  bool in_cache = false;
  std::string options = "";  // beside the bucket, as in a codec's text

  // Measured.
  double seconds = INFINITY;        // of one pass over `elements`
  double bound_seconds = INFINITY;  // that memory alone would take; not set for rows in cache
  size_t elements = 0;
  double error = 0;  // relative, L2

  double rate() const { return static_cast<double>(elements) * 4 / seconds * 1e-9; }
  double percent() const { return 100 * bound_seconds / seconds; }
  std::string spec() const { return codec + std::to_string(bits) + ":bucket=" + std::to_string(bucket) + options; }
  bool rotated() const { return isRotated(CodecSpec::parse(spec())); }
};

std::vector<Row> rowsOf(const KernelTable* form);

// Measures all rows, and calls `done` with each.
void measureRows(const Options& options, std::vector<Row>& rows, const std::function<void(const Row&)>& done);

std::vector<Gate> judge(const std::vector<Row>& rows);

}  // namespace lowcomm
