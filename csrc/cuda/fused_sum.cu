#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/error.h"
#include "codec/family.h"
#include "cuda/fused.h"
#include "cuda/fused_grid.cuh"
#include "cuda/fused_sum_args.cuh"

namespace lowcomm::cuda {

void encodeSum(const Place& place, const GridRun& run, void* payload, void* out, std::span<const FusedTerm> terms,
               uint32_t average_over, uint64_t block, const PhiloxKey& key, uint32_t* refused) {
  constexpr const char* kWhat = "encode sum";
  const GridArgs<std::byte> grid = fusedGrid(kWhat, run, payload, refused);
  if (terms.empty() || terms.size() > kMostTerms) {
    throw ValueError(std::string(kWhat) + ": terms: expected 1..." + std::to_string(kMostTerms) + ", got " +
                     std::to_string(terms.size()));
  }
  SumTerms sum{};
  sum.count = static_cast<uint32_t>(terms.size());
  sum.average_over = average_over;
  sum.pad = static_cast<size_t>(grid.pad - grid.meta);
  sum.words = static_cast<size_t>(grid.words - grid.meta);
  sum.own = run.dtype;
  for (size_t k = 0; k < terms.size(); ++k) {
    sum.term[k] = terms[k];
    if (terms[k].payload == nullptr && terms[k].own == nullptr) {
      throw ValueError(std::string(kWhat) + ": term " + std::to_string(k) +
                       ": expected a payload or elements, got none");
    }
    if (const auto at = reinterpret_cast<uintptr_t>(terms[k].payload) % 16; terms[k].own == nullptr && at != 0) {
      throw ValueError(std::string(kWhat) + ": payload of term " + std::to_string(k) +
                       ": expected an address that is a multiple of 16, got " + std::to_string(at) + " more");
    }
  }
  if (run.count == 0) return;
  const GridFamily& family = *gridFamily(run.codec.id);
  const auto as = family.centred ? encodeSumAs<true> : encodeSumAs<false>;
  as(place, kWhat, gridRule(family), grid, sum, out, block, key);
}

}  // namespace lowcomm::cuda
