// Parameters of a device in host memory and back: one buffer, one wait, and the bits of single copies.
#include "tensor/host_parameters.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "fake_device.h"

namespace lowcomm {
namespace {

using namespace fake_device;

int64_t count(const std::string& order) {
  return std::count_if(told.begin(), told.end(), [&](const auto& t) { return t.starts_with(order); });
}

size_t place(const std::string& order) {
  const auto at = std::find(told.begin(), told.end(), order);
  EXPECT_NE(at, told.end()) << order;
  return static_cast<size_t>(at - told.begin());
}

TEST(HostParameters, ADevicesTakeOneBufferAndACopyStream) {
  reset();
  const std::vector<at::Tensor> parameters = {onDevice({1, 2, 3}), at::full({2}, 7.0), onDevice({4})};
  HostParameters hosts(parameters);
  EXPECT_EQ(count("copy to host on 0:7"), 2);  // the copy stream, behind the caller's
  EXPECT_LT(place("record e1 on 0:5"), place("block 0:7 on e1"));
  EXPECT_LT(place("block 0:7 on e1"), place("copy to host on 0:7"));
  EXPECT_EQ(count("synchronize"), 0);
  EXPECT_TRUE(hosts.wide(0).is_alias_of(hosts.wide(2)));  // the buffer
  EXPECT_EQ(count("synchronize"), 2);                     // for each by itself, once
  EXPECT_TRUE(hosts.wide(1).is_alias_of(parameters[1]));
  for (size_t i = 0; i < 3; ++i) {
    const at::Tensor wide = hosts.wide(i);
    wide.add_(0.5);
    hosts.round(i, wide);
  }
  EXPECT_EQ(count("copy to device on 0:7"), 2);  // on their way while the pass goes on
  hosts.store();
  EXPECT_EQ(count("copy to device"), 2);
  EXPECT_EQ(count("synchronize"), 2);
  EXPECT_TRUE(told.back().starts_with("block 0:5 on")) << told.back();  // the caller's stream waits for them
  EXPECT_EQ(elementsOf(parameters[0]), (std::vector<float>{1.5, 2.5, 3.5}));
  EXPECT_EQ(elementsOf(parameters[1]), (std::vector<float>{7.5, 7.5}));
  EXPECT_EQ(elementsOf(parameters[2]), (std::vector<float>{4.5}));
}

TEST(HostParameters, WhatIsNotRoundedIsStored) {
  reset();
  const std::vector<at::Tensor> parameters = {onDevice({1, 2}, 0), onDevice({3}, 1)};
  HostParameters hosts(parameters);
  for (size_t i = 0; i < 2; ++i)
    hosts.host(i).add_(1);
  EXPECT_EQ(elementsOf(parameters[0]), (std::vector<float>{1, 2}));  // not yet
  hosts.store();
  EXPECT_EQ(elementsOf(parameters[0]), (std::vector<float>{2, 3}));
  EXPECT_EQ(elementsOf(parameters[1]), (std::vector<float>{4}));
  EXPECT_EQ(count("copy to device on 0:7"), 1);
  EXPECT_EQ(count("copy to device on 1:7"), 1);
  EXPECT_EQ(count("block 1:6 on"), 1);
}

TEST(HostParameters, NarrowOnesAreRounded) {
  reset();
  const at::Tensor device = at::empty({2}, at::TensorOptions(at::kBFloat16).device(c10::Device(kType, 0)));
  const at::Tensor host = at::tensor({1.0f, 2.0f}).to(at::kBFloat16), same = host.clone();
  device.copy_(host);
  HostParameters hosts({device, same});
  for (size_t i = 0; i < 2; ++i) {
    const at::Tensor wide = hosts.wide(i);
    EXPECT_EQ(wide.scalar_type(), at::kFloat);
    wide.add_(1.0f / 512);
    hosts.round(i, wide);
    EXPECT_TRUE(hosts.wide(i).equal(at::tensor({1.0f, 2.0f})));
  }
  hosts.store();
}

TEST(HostParameters, ThoseOfTheHostTakeNone) {
  reset();
  HostParameters hosts({at::ones({2}), at::ones({2, 2}).t()});
  EXPECT_EQ(hosts.wide(1).strides(), (std::vector<int64_t>{2, 1}));
  hosts.store();
  EXPECT_TRUE(told.empty());
}

}  // namespace
}  // namespace lowcomm
