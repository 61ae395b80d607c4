// Errors that a caller gets, with or without a device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/error.h"
#include "cuda/grid.h"

namespace lowcomm {
namespace {

alignas(16) std::byte payload[4096];
uint32_t refused;

template <class Error>
std::string refusal(const cuda::GridRun& run, void* at = payload, const cuda::Place& place = {}) {
  try {
    float y[16] = {};
    cuda::decodeGrid(place, run, y, at, &refused);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

// minmax<bits>:bucket=<bucket>, made without the parser's checks.
CodecSpec minmax(uint8_t bits, uint32_t bucket) {
  CodecSpec spec;
  spec.id = CodecId::minmax;
  spec.bits = bits;
  spec.bucket = bucket;
  return spec;
}

TEST(CudaErrors, RunsThatAreNoGridCodecs) {
  EXPECT_EQ(refusal<ValueError>({minmax(9, 64), DType::float32, 1}), "decode grid: bits: expected 1...8, got 9");
  EXPECT_EQ(refusal<ValueError>({minmax(0, 64), DType::float32, 1}), "decode grid: bits: expected 1...8, got 0");
  EXPECT_EQ(refusal<ValueError>({minmax(4, 96), DType::float32, 1}),
            "decode grid: bucket: expected a power of two in 64...65536 or tensor, got 96");
  EXPECT_EQ(refusal<ValueError>({CodecSpec::parse("none"), DType::float32, 1}),
            "decode grid: codec: expected a grid codec, got none");
  EXPECT_EQ(refusal<TypeError>({minmax(4, 64), DType::float64, 1}),
            "decode grid: elements: expected float32, float16 or bfloat16, got float64");
  EXPECT_EQ(refusal<ValueError>({minmax(4, 64), DType::float32, 1}, payload + 8),
            "decode grid: payload: expected an address that is a multiple of 16, got 8 more");
}

// Codecs and options that have no kernels here: none is coded as if it had not been asked for.
TEST(CudaErrors, WhatThereAreNoKernelsFor) {
  const auto of = [](const char* text) { return refusal<ValueError>({CodecSpec::parse(text), DType::float32, 1}); };
  EXPECT_EQ(of("sym4:axis=channel,C=64"), "decode grid: axis: expected none, got channel");
  EXPECT_EQ(of("minmax4:bucket=tensor"), "decode grid: bucket: expected a power of two in 64...65536, got tensor");
  for (const char* text : {"fp16", "topk", "logbyte"})
    EXPECT_TRUE(of(text).starts_with("decode grid: codec: expected a grid codec, got ")) << text << of(text);
}

TEST(CudaErrors, LevelTablesThatDoNotFit) {
  const auto of = [](const char* text, const LevelTable* levels) {
    return refusal<ValueError>({CodecSpec::parse(text), DType::float32, 0, levels});
  };
  const LevelTable two({0, 1}), four({0, 0.25f, 0.5f, 1});
  EXPECT_EQ(of("levels2", nullptr), "decode grid: level table: expected 4 values, got none");
  EXPECT_EQ(of("levels2", &two), "decode grid: level table: expected 4 values, got 2 values");
  EXPECT_EQ(of("gauss2", &four), "decode grid: level table: expected none, got 4 values");
  EXPECT_EQ(of("levels2", &four), "no error");
}

TEST(CudaErrors, NothingIsDoneForNoElements) {
  EXPECT_EQ(refusal<std::exception>({minmax(4, 64), DType::float32, 0}, nullptr), "no error");
}

TEST(CudaErrors, ADeviceThatIsNotThereIsNamedWithCudasText) {
  const cuda::Place nowhere{1000, nullptr};
  const std::string text = refusal<cuda::CudaError>({minmax(4, 64), DType::float32, 1}, payload, nowhere);
  EXPECT_TRUE(text.starts_with("decode grid on CUDA device 1000: expected cudaSuccess, got cudaError")) << text;
  if (cuda::deviceCount() > 0) {
    EXPECT_TRUE(text.ends_with("cudaErrorInvalidDevice (101): invalid device ordinal")) << text;
  }
}

TEST(CudaErrors, TheCallersDeviceIsItsOwnAgain) {
  if (cuda::deviceCount() < 2) GTEST_SKIP() << "fewer than two CUDA devices";
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  void* there = nullptr;
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  ASSERT_EQ(cudaMalloc(&there, 256), cudaSuccess);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  auto* bytes = static_cast<std::byte*>(there);
  cuda::encodeGrid({1, nullptr}, {minmax(4, 64), DType::float32, 0}, bytes, bytes + 192, 0, {}, nullptr);
  const std::vector<float> x(1, 2.0f);
  ASSERT_EQ(cudaMemcpy(bytes + 192, x.data(), 4, cudaMemcpyDefault), cudaSuccess);
  cuda::encodeGrid({1, nullptr}, {minmax(4, 64), DType::float32, 1}, bytes, bytes + 192, 0, {},
                   reinterpret_cast<uint32_t*>(bytes + 196));
  int device = -1;
  ASSERT_EQ(cudaGetDevice(&device), cudaSuccess);
  EXPECT_EQ(device, 0);
  ASSERT_EQ(cudaFree(there), cudaSuccess);
}

}  // namespace
}  // namespace lowcomm
