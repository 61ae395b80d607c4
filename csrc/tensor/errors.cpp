#include "tensor/errors.h"

#include <ATen/MemoryOverlap.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>

#include "base/error.h"
#include "base/signals.h"

namespace lowcomm {

namespace {

template <class E>
std::exception_ptr make(const std::string& what) {
  return std::make_exception_ptr(E({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, what));
}

}  // namespace

std::exception_ptr asTorchError(std::exception_ptr error) {
  if (!error) return error;
  try {
    std::rethrow_exception(error);
  } catch (const ValueError& e) {
    return make<c10::ValueError>(e.what());
  } catch (const TypeError& e) {
    return make<c10::TypeError>(e.what());
  } catch (const PeerError& e) {
    return make<c10::DistBackendError>(e.what());
  } catch (const WireError& e) {
    return make<c10::DistBackendError>(e.what());
  } catch (const SignalError& e) {
    return e.error;
  } catch (...) {
    return std::current_exception();
  }
}

std::exception_ptr asInnerError(std::exception_ptr error, const std::string& context,
                                const std::function<std::string(const std::string& message, bool fault)>& ending) {
  if (!error) return error;
  const auto lost = [&](const std::string& why, bool fault) {
    const std::string message = context + ": " + why;
    return make<c10::DistBackendError>(ending ? message + ending(message, fault) : message);
  };
  try {
    std::rethrow_exception(error);
  } catch (const c10::ValueError&) {
    return std::current_exception();
  } catch (const c10::TypeError&) {
    return std::current_exception();
  } catch (const c10::IndexError&) {
    return std::current_exception();
  } catch (const c10::NotImplementedError&) {
    return std::current_exception();
  } catch (const c10::DistBackendError& e) {
    return lost(e.what_without_backtrace(), /*fault=*/true);
  } catch (const c10::Error& e) {
    return lost(e.what_without_backtrace(), /*fault=*/false);
  } catch (const std::runtime_error& e) {
    return lost(e.what(), /*fault=*/true);
  } catch (...) {
    return std::current_exception();
  }
}

void checkOutput(const char* op, const at::Tensor& output) {
  TORCH_CHECK_VALUE(at::has_internal_overlap(output) != at::MemOverlap::Yes, "lowcomm: ", op,
                    ": expected an output without elements that share memory, got shape ", output.sizes(),
                    " with strides ", output.strides());
}

void checkOutputs(const char* op, const std::vector<at::Tensor>& outputs) {
  std::vector<const at::Tensor*> by_address;
  for (const auto& output : outputs) {
    if (!output.defined() || output.layout() != at::kStrided || output.numel() == 0) continue;
    checkOutput(op, output);
    if (output.is_non_overlapping_and_dense()) by_address.push_back(&output);
  }
  const auto begin = [](const at::Tensor* output) { return static_cast<const std::byte*>(output->const_data_ptr()); };
  std::sort(by_address.begin(), by_address.end(),
            [&](const at::Tensor* a, const at::Tensor* b) { return begin(a) < begin(b); });
  for (size_t i = 1; i < by_address.size(); ++i) {
    const at::Tensor *a = by_address[i - 1], *b = by_address[i];
    TORCH_CHECK_VALUE(a->device() != b->device() || begin(a) + a->nbytes() <= begin(b), "lowcomm: ", op,
                      ": expected outputs that share no memory, got two of shapes ", a->sizes(), " and ", b->sizes(),
                      " that do");
  }
}

void checkCoded(const Layout& layout, at::ScalarType type) {
  TORCH_CHECK_TYPE(!layout.coded() || type == at::kFloat || type == at::kHalf || type == at::kBFloat16,
                   "lowcomm: a layout with codecs: expected float32, float16 or bfloat16, got ", type);
}

}  // namespace lowcomm
