#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "codec/spec.h"
#include "kernels/isa/table.h"
#include "timing.h"

namespace lowcomm {

enum class Loop { encode, decode, add };
constexpr const char* kLoopNames[] = {"encode", "decode", "decode-add"};

// A loop of one codec on one instruction set.
struct Row {
  Row(const KernelTable* form, Loop loop, const std::string& text, DType dtype = DType::float32)
      : form(form), loop(loop), spec(CodecSpec::parse(text)), text(text), dtype(dtype) {}

  const KernelTable* form;
  Loop loop;
  CodecSpec spec;
  std::string text;  // as the codec is asked for
  DType dtype;

  // Measured.
  double seconds = INFINITY;        // of one pass over `elements`
  double bound_seconds = INFINITY;  // that memory alone would take
  size_t elements = 0;
  double bits = 0;   // of payload an element, metadata and all
  double error = 0;  // relative, L2

  std::string name() const { return std::string(kLoopNames[static_cast<int>(loop)]) + " " + text; }
  double rate() const { return static_cast<double>(elements) * 4 / seconds * 1e-9; }
  double percent() const { return 100 * bound_seconds / seconds; }
};

std::vector<Row> rowsOf(const KernelTable* form);

// Measures all rows, and calls `done` with each.
void measureRows(const Options& options, std::vector<Row>& rows, const std::function<void(const Row&)>& done);

std::vector<Gate> judge(const std::vector<Row>& rows);

}  // namespace lowcomm
