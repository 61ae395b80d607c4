#include "subspace/boundary.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <string>
#include <vector>

#include "base/error.h"
#include "tensor/parallel.h"
#include "tensor/product.h"

#if LOWCOMM_CUDA_KERNELS
#include <c10/core/impl/VirtualGuardImpl.h>

#include "cuda/accumulate.h"
#include "cuda/token_rows.h"
#include "tensor/device_queue.h"
#endif

namespace lowcomm {
namespace {

// Rows whose difference is formed before they are multiplied: what stays in a second-level cache.
constexpr int64_t kBlockBytes = 512 << 10;

// x + sign·(positions + T_fixed[tokens]) on a CUDA device, in a new tensor, on its current stream. `x` is [n, width]
// of fp32 or fp64, `tokens` int64 contiguous with n elements, both on one device. Throws ValueError where this build
// has no kernels for the device.
#if LOWCOMM_CUDA_KERNELS
at::Tensor addAnchorOnDevice(const at::Tensor& x, const at::Tensor& tokens, const SubspaceAnchor& anchor, float sign) {
  const c10::Device device = x.device();
  if (!device.is_cuda() || !cuda::runsOn(device.index())) {
    throw ValueError(
        "subspace: activations: expected them on the host or on a CUDA device that this build has kernels "
        "for, got " +
        device.str());
  }
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  const cuda::Place place{device.index(), static_cast<CUstream_st*>(handleOf(stream).value())};
  const int64_t width = x.size(1);
  const at::Tensor rows = at::empty(x.sizes(), x.options().dtype(at::kFloat));
  const bool narrow = x.scalar_type() == at::kFloat && !anchor.positions;
  cuda::addTokenRows(place, rows.mutable_data_ptr<float>(), narrow ? x.const_data_ptr<float>() : nullptr,
                     tokens.const_data_ptr<int64_t>(), static_cast<uint64_t>(x.size(0)), anchor.tokens, anchor.normal,
                     sign);
  if (narrow) return rows;
  at::Tensor sum = x.clone();
  if (anchor.positions) {
    const int64_t time = anchor.positions->size(0);
    sum.view({-1, time, width}).add_(anchor.positions->unsqueeze(0), sign);
  }
  return sum.add_(rows.to(x.scalar_type()));
}
#else
at::Tensor addAnchorOnDevice(const at::Tensor& x, const at::Tensor&, const SubspaceAnchor&, float) {
  throw ValueError("subspace: activations: expected them on the host, as this build has no CUDA kernels, got them on " +
                   x.device().str());
}
#endif

std::string shapeOf(const at::Tensor& tensor) {
  return c10::str(tensor.sizes());
}

void expectTokens(const at::Tensor& tokens, int64_t vocabulary) {
  if (tokens.scalar_type() != at::kLong) {
    throw TypeError(std::string("subspace: ids: expected int64, got ") + c10::toString(tokens.scalar_type()));
  }
  if (!tokens.is_cpu()) return;  // a look would wait for the device
  const int64_t* const ids = tokens.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < tokens.numel(); ++i) {
    if (ids[i] < 0 || ids[i] >= vocabulary) {
      throw ValueError("subspace: ids: expected 0..." + std::to_string(vocabulary - 1) + ", got " +
                       std::to_string(ids[i]) + " at element " + std::to_string(i));
    }
  }
}

// The tensor has a row of `width` for each token.
void expectRows(const char* what, const at::Tensor& tensor, const at::Tensor& tokens, int64_t width) {
  const bool fits = tensor.dim() == tokens.dim() + 1 && tensor.size(-1) == width &&
                    tensor.sizes().slice(0, tokens.dim()) == tokens.sizes() && tensor.device() == tokens.device();
  if (fits) return;
  throw ValueError(std::string("subspace: ") + what + ": expected [..., " + std::to_string(width) +
                   "] for ids of shape " + shapeOf(tokens) + " on " + tokens.device().str() + ", got " +
                   shapeOf(tensor) + " on " + tensor.device().str());
}

void expectPositions(const SubspaceAnchor& anchor, const at::Tensor& tokens, at::ScalarType type) {
  if (!anchor.positions) return;
  const at::Tensor& p = *anchor.positions;
  const int64_t time = tokens.dim() > 0 ? tokens.size(-1) : 1;
  if (p.dim() == 2 && p.size(0) == time && p.size(1) == static_cast<int64_t>(anchor.tokens.width) &&
      p.scalar_type() == type && p.is_contiguous() && p.device() == tokens.device()) {
    return;
  }
  throw ValueError("subspace: positions: expected contiguous [" + std::to_string(time) + ", " +
                   std::to_string(anchor.tokens.width) + "] of " + c10::toString(type) + " on " +
                   tokens.device().str() + ", got " + shapeOf(p) + " of " + c10::toString(p.scalar_type()) + " on " +
                   p.device().str());
}

// ---- a token's row on the host: out = x + sign·anchor, x null for 0 ----

struct AnchorRows {
  const SubspaceAnchor& anchor;
  const int64_t* ids;
  int64_t time;

  void addTokens(float* out, const float* x, int64_t row, float sign) const {
    const auto id = static_cast<uint64_t>(ids[row]);
    (anchor.normal ? addTokenNormals : addTokenSigns)(out, x, id, anchor.tokens, sign);
  }

  void add(float* out, const float* x, int64_t row, float sign) const {
    const auto width = static_cast<int64_t>(anchor.tokens.width);
    if (anchor.positions) {
      const float* p = anchor.positions->const_data_ptr<float>() + row % time * width;
      for (int64_t i = 0; i < width; ++i)
        out[i] = (x ? x[i] : 0.0f) + sign * p[i];
      x = out;
    }
    addTokens(out, x, row, sign);
  }

  void add(double* out, const double* x, int64_t row, float sign) const {
    const auto width = static_cast<int64_t>(anchor.tokens.width);
    std::vector<float> tokens(static_cast<size_t>(width));
    addTokens(tokens.data(), nullptr, row, sign);
    const double* p = anchor.positions ? anchor.positions->const_data_ptr<double>() + row % time * width : nullptr;
    for (int64_t i = 0; i < width; ++i)
      out[i] = (x ? x[i] : 0.0) + (p ? sign * p[i] : 0.0) + tokens[static_cast<size_t>(i)];
  }
};

int64_t blockRows(int64_t width, int64_t item_bytes) {
  return std::max<int64_t>(kBlockBytes / (width * item_bytes), 16);
}

AnchorRows rowsOf(const SubspaceAnchor& anchor, const at::Tensor& tokens) {
  return {anchor, tokens.const_data_ptr<int64_t>(), tokens.dim() > 0 ? tokens.size(-1) : 1};
}

template <class T>
void encodeOnHost(at::Tensor& out, const at::Tensor& x, const at::Tensor& tokens, const at::Tensor& columns,
                  const SubspaceAnchor& anchor) {
  const int64_t width = x.size(1);
  const AnchorRows rows = rowsOf(anchor, tokens);
  const T* const from = x.const_data_ptr<T>();
  inParallel(x.size(0), blockRows(width, sizeof(T)), [&](int64_t begin, int64_t end) {
    const c10::InferenceMode inference(out.is_inference());  // of the caller's thread: others do not inherit it
    const at::NoGradGuard no_grad;                           // which InferenceMode(false) ends
    const int64_t most = std::min(end - begin, blockRows(width, sizeof(T)));
    const at::Tensor difference = at::empty({most, width}, x.options());
    T* const to = difference.mutable_data_ptr<T>();
    for (int64_t at = begin; at < end; at += most) {
      const int64_t n = std::min(most, end - at);
      for (int64_t i = 0; i < n; ++i)
        rows.add(to + i * width, from + (at + i) * width, at + i, -1.0f);
      out.narrow(0, at, n).copy_(product(difference.narrow(0, 0, n), columns));
    }
  });
}

template <class T>
void decodeOnHost(at::Tensor& out, const at::Tensor& coefficients, const at::Tensor& tokens, const at::Tensor& basis,
                  const SubspaceAnchor& anchor) {
  const int64_t width = basis.size(1);
  const AnchorRows rows = rowsOf(anchor, tokens);
  T* const to = out.mutable_data_ptr<T>();
  inParallel(out.size(0), blockRows(width, sizeof(T)), [&](int64_t begin, int64_t end) {
    const c10::InferenceMode inference(out.is_inference());
    const at::NoGradGuard no_grad;
    const int64_t most = blockRows(width, sizeof(T));
    for (int64_t at = begin; at < end; at += most) {
      const int64_t n = std::min(most, end - at);
      const at::Tensor part = product(coefficients.narrow(0, at, n), basis);
      const T* const from = part.const_data_ptr<T>();
      for (int64_t i = 0; i < n; ++i)
        rows.add(to + (at + i) * width, from + i * width, at + i, 1.0f);
    }
  });
}

void expectArithmetic(const at::Tensor& rows) {
  if (rows.dim() == 2 && (rows.scalar_type() == at::kFloat || rows.scalar_type() == at::kDouble)) return;
  throw ValueError("subspace: basis: expected [rank, width] of float32 or float64, got " + shapeOf(rows) + " of " +
                   c10::toString(rows.scalar_type()));
}

}  // namespace

at::Tensor subspaceEncode(const at::Tensor& x, const at::Tensor& tokens, const at::Tensor& rows,
                          const SubspaceAnchor& anchor, int64_t vocabulary) {
  expectArithmetic(rows);
  const auto width = static_cast<int64_t>(anchor.tokens.width);
  expectRows("activation", x, tokens, width);
  const at::Tensor ids = tokens.contiguous();
  expectTokens(ids, vocabulary);
  expectPositions(anchor, tokens, rows.scalar_type());
  const at::NoGradGuard no_grad;
  const at::Tensor flat = x.to(rows.scalar_type()).contiguous().view({-1, width});
  std::vector<int64_t> shape = tokens.sizes().vec();
  shape.push_back(rows.size(0));
  // No view of another tensor: torch's pipelining detaches what a stage returns in place.
  const at::Tensor coefficients = at::empty(shape, flat.options());
  at::Tensor out = coefficients.view({-1, rows.size(0)});
  const at::Tensor columns = rows.t();
  if (!x.is_cpu()) {
    at::mm_out(out, addAnchorOnDevice(flat, ids, anchor, -1.0f), columns);
    return coefficients;
  }
  if (rows.scalar_type() == at::kFloat) {
    encodeOnHost<float>(out, flat, ids, columns, anchor);
  } else {
    encodeOnHost<double>(out, flat, ids, columns, anchor);
  }
  return coefficients;
}

at::Tensor subspaceDecode(const at::Tensor& coefficients, const at::Tensor& tokens, const at::Tensor& rows,
                          const SubspaceAnchor& anchor, int64_t vocabulary, at::ScalarType type) {
  expectArithmetic(rows);
  const int64_t rank = rows.size(0), width = rows.size(1);
  expectRows("coefficients", coefficients, tokens, rank);
  const at::Tensor ids = tokens.contiguous();
  expectTokens(ids, vocabulary);
  expectPositions(anchor, tokens, rows.scalar_type());
  const at::NoGradGuard no_grad;
  const at::Tensor flat = coefficients.to(rows.scalar_type()).contiguous().view({-1, rank});
  std::vector<int64_t> shape = tokens.sizes().vec();
  shape.push_back(width);
  if (!coefficients.is_cpu()) return addAnchorOnDevice(at::mm(flat, rows), ids, anchor, 1.0f).view(shape).to(type);
  const at::Tensor x = at::empty(shape, flat.options());
  at::Tensor out = x.view({-1, width});
  if (rows.scalar_type() == at::kFloat) {
    decodeOnHost<float>(out, flat, ids, rows, anchor);
  } else {
    decodeOnHost<double>(out, flat, ids, rows, anchor);
  }
  return x.to(type);
}

at::Tensor subspaceAnchor(const at::Tensor& tokens, const SubspaceAnchor& anchor, int64_t vocabulary,
                          at::ScalarType type) {
  const at::Tensor ids = tokens.contiguous();
  expectTokens(ids, vocabulary);
  expectPositions(anchor, tokens, type);
  const at::NoGradGuard no_grad;
  std::vector<int64_t> shape = tokens.sizes().vec();
  shape.push_back(static_cast<int64_t>(anchor.tokens.width));
  const at::Tensor zeros = at::zeros(shape, tokens.options().dtype(type)).view({-1, shape.back()});
  if (!tokens.is_cpu()) return addAnchorOnDevice(zeros, ids, anchor, 1.0f).view(shape);
  const AnchorRows rows = rowsOf(anchor, ids);
  AT_DISPATCH_FLOATING_TYPES(type, "subspace anchor", [&] {
    scalar_t* const to = zeros.mutable_data_ptr<scalar_t>();
    inParallel(zeros.size(0), 64, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        rows.add(to + row * shape.back(), static_cast<const scalar_t*>(nullptr), row, 1.0f);
    });
  });
  return zeros.view(shape);
}

}  // namespace lowcomm
