#include "collective/exact_all_reduce.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "collective_cases.h"
#include "ranks_on_threads.h"

namespace lowcomm {
namespace {

using test::Ranks;

std::vector<float> numbers(int rank, uint64_t elements) {
  std::vector<float> x(elements);
  for (uint64_t i = 0; i < elements; ++i)
    x[i] = 0.1f * static_cast<float>((i * 7 + static_cast<uint64_t>(rank) * 13) % 101) - 3.3f;
  return x;
}

// Sums in rank order, to the bit, whatever the sizes: slices are empty, of one element, or of many frames.
TEST(ExactAllReduce, SumsInRankOrder) {
  const std::vector<uint64_t> sizes = {1, 2, 511, 512, 513, 40000};
  for (int size : {1, 2, 3, 5}) {
    for (const bool average : {false, true}) {
      Ranks ranks(size);
      std::vector<std::vector<std::vector<float>>> data(size);
      const auto counters = ranks.expectRun("exact", [&](int rank, OpContext& op) {
        std::vector<ExactTensor> tensors;
        for (uint64_t elements : sizes)
          data[rank].push_back(numbers(rank, elements));
        for (auto& x : data[rank])
          tensors.push_back({x.data(), x.size()});
        exactAllReduce(op, tensors, {ReduceKind::sum, average});
      });
      for (size_t t = 0; t < sizes.size(); ++t) {
        std::vector<float> expected = numbers(0, sizes[t]);
        for (int rank = 1; rank < size; ++rank) {
          const std::vector<float> x = numbers(rank, sizes[t]);
          for (size_t i = 0; i < x.size(); ++i)
            expected[i] += x[i];
        }
        if (average) {
          for (float& x : expected)
            x /= static_cast<float>(size);
        }
        for (int rank = 0; rank < size; ++rank)
          EXPECT_TRUE(data[rank][t] == expected) << size << " ranks, rank " << rank << ", " << sizes[t] << " elements";
      }
      uint64_t raw = 0, elements = 0;
      for (const OpCounters& c : counters)
        raw += c.raw_bytes;
      for (uint64_t n : sizes)
        elements += n;
      EXPECT_EQ(raw, 2 * static_cast<uint64_t>(size - 1) * elements * sizeof(float));
    }
  }
}

}  // namespace
}  // namespace lowcomm
