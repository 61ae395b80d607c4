// Sums and differences on the vectors of lanes.inl, included before this file.

namespace lowcomm {
namespace {

template <bool kMinus>
void combine(float* out, const float* a, const float* b, size_t count) {
  const size_t whole = count / kLanes * kLanes;
  for (size_t i = 0; i < whole; i += kLanes)
    store(out + i, kMinus ? load(a + i) - load(b + i) : load(a + i) + load(b + i));
  for (size_t i = whole; i < count; ++i)
    out[i] = kMinus ? a[i] - b[i] : a[i] + b[i];
}

}  // namespace
}  // namespace lowcomm
