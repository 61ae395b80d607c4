// The program that instructions_test.cpp counts: one call of a codec for every argument "<loop> <codec> <kernel form>",
// in their order; loop is encode, decode or decode-add.
#include <cstddef>
#include <cstdint>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "codec/grid.h"
#include "kernels/isa/table.h"

namespace {

// Found by its name: callgrind collects while this function runs and writes a file when it returns.
extern "C" __attribute__((noinline)) void lowcomm_counted(const std::string& loop, const lowcomm::Codec& codec,
                                                          std::vector<std::byte>& payload, std::vector<float>& x) {
  const auto dtype = lowcomm::DType::float32;
  if (loop == "encode") codec.encode(payload, x.data(), dtype, 0, x.size(), {1, 2, 3});
  if (loop == "decode") codec.decode(x.data(), dtype, payload, 0, x.size());
  if (loop == "decode-add") codec.decodeAdd(x.data(), dtype, payload, 0, x.size());
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    std::string loop, text, form;
    std::istringstream(argv[i]) >> loop >> text >> form;
    const lowcomm::GridCodec codec(lowcomm::CodecSpec::parse(text), lowcomm::chooseKernels(form.c_str()));
    std::vector<float> x(LOWCOMM_COUNTED_ELEMENTS);
    std::mt19937 generator(1);
    for (float& v : x)
      v = static_cast<float>(generator() >> 8) * 0x1p-24f;
    std::vector<std::byte> payload(codec.encodedBytes(x.size(), lowcomm::DType::float32));
    codec.encode(payload, x.data(), lowcomm::DType::float32, 0, x.size(), {1, 2, 3});
    lowcomm_counted(loop, codec, payload, x);
  }
  return 0;
}
