#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "wire/layout.h"

namespace lowcomm {

// Mistakes of an op's caller, found before anything is sent.

// Throws ValueError where elements of an op's output share memory, as those of an expanded tensor do.
void checkOutput(const char* op, const at::Tensor& output);

// As checkOutput() of each output that has elements, and ValueError where two of them share memory, as far as dense
// ones tell.
void checkOutputs(const char* op, const std::vector<at::Tensor>& outputs);

// Throws TypeError where a layout codes and the dtype cannot be encoded.
void checkCoded(const Layout& layout, at::ScalarType type);

}  // namespace lowcomm
