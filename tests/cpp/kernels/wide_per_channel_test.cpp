// The loops over channels at 16 lanes.
#include <cstring>

#include "kernels/finite.h"
#include "kernels/grid/grid_rules.h"
#include "kernels/isa/table.h"
#include "kernels/per_channel/per_channel.h"
#include "sixteen_lanes.inl"
//
#include "kernels/per_channel/per_channel_vector.inl"
#include "wide_cases.h"

namespace lowcomm {
namespace {

const ChannelKernels kChannels = {range, largest, sums, encode, decode};

TEST(SixteenLanes, ChannelsAsScalar) {
  KernelTable table = *scalarKernels();
  table.channels = &kChannels;
  for (const char* text :
       {"minmax1", "minmax2:meta=bf16", "qsgd3", "lattice5", "sym6", "sym3:range=l2", "mid7", "minmax8", "sign1"}) {
    for (size_t channels : {1, 3, 16, 40, 1000}) {
      const bool options = std::strchr(text, ':') != nullptr;
      const std::string all = text + std::string(options ? "," : ":") + "axis=channel,C=" + std::to_string(channels);
      std::vector<size_t> sizes;
      for (size_t rows : {0, 1, 5, 16, 17, 171, 512, 513}) {
        if (rows * channels < 20000) sizes.push_back(rows * channels);
      }
      test::expectScalars(all, table, sizes);
    }
  }
}

}  // namespace
}  // namespace lowcomm
