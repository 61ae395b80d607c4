#include "codec/nonfinite.h"

#include "base/error.h"
#include "codec/element.h"
#include "kernels/finite.h"

namespace lowcomm {

void expectFinite(const CodecSpec& codec, const void* x, DType dtype, uint64_t first, uint64_t count,
                  const std::string& of) {
  const float limit = finiteLimit(codec);
  const int64_t bad = firstNonFinite(x, dtype, count, limit);
  if (bad < 0) return;
  const auto at = static_cast<uint64_t>(bad);
  throw NonFiniteError(codec.str(), elementAt(x, dtype, at), first + at, limit, of);
}

}  // namespace lowcomm
