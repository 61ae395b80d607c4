// Bytes of an outer loop's state, counted by what they hold; and when there are none.
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <string>

#include "diloco_ranks.h"

namespace lowcomm {
namespace {

using namespace test;

const std::vector<std::vector<int64_t>> kLarge = {{512, 512}, {256, 1024}};
constexpr double kElements = 2 * 512 * 512;

// Of rank 0, after some outer steps of which the last is under way (mode sync: applied).
OuterMemory memoryOf(const DiLoCoXOptions& o, int size = 2, at::ScalarType type = at::kFloat) {
  Ranks ranks(size);
  OuterMemory memory;
  onRanks(ranks, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
    Trainee trainee(rank, kLarge);
    for (OuterParameter& parameter : trainee.parameters)
      parameter.tensor = parameter.tensor.to(type);
    trainee.loop = std::make_unique<DiLoCoX>(trainee.parameters, queue, o);
    for (int64_t step = 0; step < 9; ++step) {
      for (OuterParameter& parameter : trainee.parameters)
        parameter.tensor.mul_(0.99);
      trainee.loop->step();
    }
    if (rank == 0) memory = trainee.loop->report().memory;
    trainee.loop->finish();
  });
  return memory;
}

double each(uint64_t bytes) {
  return static_cast<double>(bytes) / kElements;
}

constexpr double kFourBits = (4 + 32.0 / 128) / 8;

TEST(DiLoCoXMemory, IsCountedByWhatItHolds) {
  DiLoCoXOptions o = coded(options(2, OuterMode::proceed), "sym4:bucket=128");
  const OuterMemory wide = memoryOf(o);
  EXPECT_EQ(each(wide.outer), 4);
  EXPECT_EQ(each(wide.momentum), 4);
  EXPECT_EQ(each(wide.start), 4);
  EXPECT_EQ(each(wide.residual), 8);
  EXPECT_NEAR(each(wide.average), kFourBits, 0.01);
  EXPECT_EQ(wide.mark + wide.rounding, 0);

  o.rank = 16;  // factors in place of codes
  EXPECT_NEAR(each(memoryOf(o).average), 4.0 * 16 * (512 + 512 + 256 + 1024) / kElements, 0.01);
}

TEST(DiLoCoXMemory, OfSixteenBitParametersHasTheirMark) {
  const OuterMemory memory = memoryOf(coded(options(2, OuterMode::proceed), "gauss2", 0, false), 2, at::kBFloat16);
  EXPECT_EQ(each(memory.mark), 2);
  EXPECT_EQ(each(memory.rounding), 4);
  EXPECT_EQ(each(memory.start), 4);
}

// Nothing is encoded in a group of one rank: the average is its own pseudo-gradient, in fp32.
TEST(DiLoCoXMemory, OfOneRankHasItsAverageDecoded) {
  EXPECT_EQ(each(memoryOf(coded(options(2, OuterMode::proceed), "gauss2", 0, false), 1).total()), 16);
}

// The host's memory, of which a thread that sets `left` gets so many bytes and no more; what it gives back it has
// again.
struct LimitedMemory final : c10::Allocator {
  static constexpr int64_t kUnlimited = -1;
  static inline thread_local int64_t left = kUnlimited;

  c10::DataPtr allocate(size_t bytes) override {
    const auto wanted = static_cast<int64_t>(bytes);
    if (left != kUnlimited && wanted > left) TORCH_CHECK_WITH(OutOfMemoryError, false, "no memory is left");
    void* memory = c10::GetDefaultCPUAllocator()->raw_allocate(bytes);
    if (left != kUnlimited) {
      left -= wanted;
      taken[memory] = wanted;
    }
    return {memory, memory, give, c10::Device(c10::kCPU)};
  }
  static void give(void* memory) {
    const auto found = taken.find(memory);
    if (found != taken.end()) {
      if (left != kUnlimited) left += found->second;
      taken.erase(found);
    }
    c10::GetDefaultCPUAllocator()->raw_deallocate(memory);
  }
  c10::DeleterFnPtr raw_deleter() const override { return give; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

  // The text of the error of f, which has so many bytes.
  template <class F>
  static std::string error(int64_t bytes, F&& f) {
    static LimitedMemory limited;
    c10::SetCPUAllocator(&limited, /*priority=*/100);
    left = bytes;
    std::string text = test::thrownBy<std::exception>(f);
    left = kUnlimited;
    return text;
  }

 private:
  static inline thread_local std::map<void*, int64_t> taken;  // while it was limited
};

TEST(DiLoCoXMemory, TellsTheOthersThatThereIsNone) {
  std::vector<std::string> errors(2);
  Ranks ranks(2);
  onRanks(ranks, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
    Trainee trainee(rank, test::kShapes);
    const auto make = [&] { DiLoCoX(trainee.parameters, queue, options(3, OuterMode::sync)); };
    errors[rank] = rank == 1 ? LimitedMemory::error(20'000, make) : test::thrownBy<std::exception>(make);
  });
  EXPECT_TRUE(test::holds(errors[0], {"rank 1", "no memory is left"})) << errors[0];
  EXPECT_TRUE(test::holds(errors[1], {"no memory is left"})) << errors[1];
}

}  // namespace
}  // namespace lowcomm
