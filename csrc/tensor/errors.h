#pragma once

#include <ATen/ATen.h>

#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "wire/layout.h"

namespace lowcomm {

// The core's exceptions as torch's: ValueError -> c10::ValueError, TypeError -> c10::TypeError, PeerError and WireError
// -> c10d::DistBackendError, SignalError -> what the handler raised; others unchanged. Null stays null.
std::exception_ptr asTorchError(std::exception_ptr error);

// Runs f, throwing torch's exceptions for the core's.
template <class F>
auto translated(F&& f) {
  try {
    return f();
  } catch (...) {
    std::rethrow_exception(asTorchError(std::current_exception()));
  }
}

// An inner backend's error under lowcomm's name: DistBackendError with op, sequence, group and rank before its own
// text, and what `ending` makes of the whole after it; `fault` tells an error of a peer or the network (NCCL raises a
// DistBackendError) from one of torch's checks. Errors that already are ValueError, TypeError or the like stay what
// they are.
std::exception_ptr asInnerError(std::exception_ptr error, const std::string& context,
                                const std::function<std::string(const std::string& message, bool fault)>& ending = {});

// Mistakes of an op's caller, found before anything is sent.

// Throws ValueError where elements of an op's output share memory, as those of an expanded tensor do.
void checkOutput(const char* op, const at::Tensor& output);

// As checkOutput() of each output that has elements, and ValueError where two of them share memory, as far as dense
// ones tell.
void checkOutputs(const char* op, const std::vector<at::Tensor>& outputs);

// Throws TypeError where a layout codes and the dtype cannot be encoded.
void checkCoded(const Layout& layout, at::ScalarType type);

}  // namespace lowcomm
