
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "backend/options.h"
#include "base/error.h"
#include "errors.h"

namespace lowcomm {
namespace {

template <class F>
void expectRefused(F&& call, const std::vector<std::string>& parts) {
  EXPECT_TRUE(test::holds(test::thrownBy<ValueError>(call), parts));
}

// Environment variables for as long as it lives.
class Environment {
 public:
  explicit Environment(std::map<std::string, std::string> values) : values_(std::move(values)) {
    for (const auto& [name, value] : values_)
      setenv(name.c_str(), value.c_str(), 1);
  }
  ~Environment() {
    for (const auto& [name, value] : values_)
      unsetenv(name.c_str());
  }

 private:
  const std::map<std::string, std::string> values_;
};

class OptionsTest : public testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : {"LOWCOMM_POLICY", "LOWCOMM_MIN_BYTES", "LOWCOMM_SEED", "LOWCOMM_CHUNK_BYTES",
                             "LOWCOMM_CONNECTIONS", "LOWCOMM_ENCODE_ON_DEVICE"})
      unsetenv(name);
  }
};

TEST(Policy, TextIsCanonicalAndParsesBack) {
  const std::map<std::string, std::string> texts = {
      {"", ""},
      {"  ;\t; ", ""},
      {"all_gather=minmax8", "all_gather=minmax8:bucket=1024"},
      {" reduce_scatter = qsgd4:bucket=64 ;all_gather=minmax8;",
       "all_gather=minmax8:bucket=1024; reduce_scatter=qsgd4:bucket=64"},
      {"all_gather=none; reduce_scatter=qsgd1", "reduce_scatter=qsgd1:bucket=1024"},
  };
  for (const auto& [text, canonical] : texts) {
    EXPECT_EQ(Policy::parse(text).str(), canonical);
    EXPECT_EQ(Policy::parse(canonical).str(), canonical);
    EXPECT_EQ(Policy::parse(text).empty(), canonical.empty());
  }
}

TEST(Policy, ListsWhatMayBeCompressed) {
  const Policy policy = Policy::parse("p2p=qsgd4; all_gather=minmax8:bucket=512");
  EXPECT_EQ(policy.codec("all_gather"), (CodecSpec{CodecId::minmax, 8, 512}));
  EXPECT_EQ(policy.codec("p2p"), (CodecSpec{CodecId::qsgd, 4, 1024}));
  EXPECT_EQ(policy.codec("reduce_scatter"), std::nullopt);
  EXPECT_EQ(policy.codec("all_reduce"), std::nullopt);
  EXPECT_EQ(Policy().codec("all_gather"), std::nullopt);
}

TEST(Policy, RefusesByName) {
  const std::map<std::string, std::vector<std::string>> cases = {
      {"minmax8", {"expected 'op=codec'", "'minmax8'"}},
      {"all_gather=minmax8; qsgd8", {"expected 'op=codec'", "'qsgd8'"}},
      {"allgather=minmax8", {"unknown op 'allgather'", "all_gather", "p2p", "reduce_scatter"}},
      {"=minmax8", {"unknown op ''"}},
      {"all_gather=minmax8, reduce_scatter=qsgd8", {"policy: all_gather: codec", "separated by ';'"}},
      {"all_to_all=sym8:axis=channel,C=8", {"all_to_all", "shape", "axis=channel"}},
      {"barrier=qsgd8", {"unknown op 'barrier'", "all_reduce"}},
      {"all_gather=minmax8; all_gather=qsgd8", {"'all_gather' is named twice"}},
      {"all_gather=none; all_gather=qsgd8", {"'all_gather' is named twice"}},
      {"all_gather=", {"codec ''"}},
      {"all_gather=minmax9", {"bits: expected 1...8"}},
      {"all_gather=minmax8:bucket=100", {"bucket: expected a power of two in 64...65536", "'100'"}},
      {"all_gather=zip", {"expected one of", "'zip'"}},
  };
  for (const auto& [text, parts] : cases)
    expectRefused([&] { Policy::parse(text); }, parts);
}

TEST(Policy, TensorsThatACodecCannotTakeGoExact) {
  using Sizes = std::vector<int64_t>;
  const struct {
    const char* codec;
    Sizes sizes;
    const char* because;  // null: it is encoded
  } cases[] = {
      {"minmax8", {int64_t{1} << 40}, nullptr},
      {"topk", {int64_t{1} << 40}, nullptr},
      {"minmax8:bucket=tensor", {int64_t{1} << 31}, nullptr},
      {"minmax8:bucket=tensor", {(int64_t{1} << 31) + 1}, "bucket=tensor of more than 2147483648 elements"},
      {"sym4:bucket=tensor", {65536, 4, 65536}, "bucket=tensor of more than 2147483648 elements"},
      {"sym4:bucket=tensor", {0, int64_t{1} << 40}, nullptr},
      {"sym4:bucket=tensor", {}, nullptr},
      {"sym4:axis=channel", {7, 65536}, nullptr},
      {"sym4:axis=channel,C=5", {7, 5}, nullptr},
      {"sym4:axis=channel", {7, 65537}, "axis=channel of a last dimension that is not 1...65536"},
      {"sym4:axis=channel", {7, (int64_t{1} << 32) + 1}, "axis=channel of a last dimension that is not 1...65536"},
      {"sym4:axis=channel", {7, 0}, "axis=channel of a last dimension that is not 1...65536"},
      {"sym4:axis=channel", {7}, "axis=channel of a tensor without channels"},
      {"sym4:axis=channel,C=5", {7, 6}, "axis=channel of another number of channels than C"},
  };
  for (const auto& c : cases) {
    const auto why = untaken(CodecSpec::parse(c.codec), c.sizes);
    EXPECT_EQ(why.value_or("taken"), c.because ? c.because : "taken") << c.codec;
  }
}

TEST_F(OptionsTest, DefaultsAreExact) {
  const Settings settings = Options().resolve();
  EXPECT_TRUE(settings.policy.empty());
  EXPECT_EQ(settings.min_bytes, 65536u);
  EXPECT_EQ(settings.seed, 0u);
  EXPECT_EQ(settings.chunk_bytes, 262144u);
}

TEST_F(OptionsTest, EnvironmentFillsUnsetFieldsOnly) {
  const Environment environment({{"LOWCOMM_POLICY", "all_gather=qsgd4"},
                                 {"LOWCOMM_MIN_BYTES", "1"},
                                 {"LOWCOMM_SEED", "2"},
                                 {"LOWCOMM_CHUNK_BYTES", "65536"}});
  Options options;
  Settings settings = options.resolve();
  EXPECT_EQ(settings.policy.str(), "all_gather=qsgd4:bucket=1024");
  EXPECT_EQ(settings.min_bytes, 1u);
  EXPECT_EQ(settings.seed, 2u);
  EXPECT_EQ(settings.chunk_bytes, 65536u);

  options.policy = "";  // exact, said aloud
  options.min_bytes = 0;
  settings = options.resolve();
  EXPECT_TRUE(settings.policy.empty());
  EXPECT_EQ(settings.min_bytes, 0u);
  EXPECT_EQ(settings.seed, 2u);
  options.seed = 9;
  options.chunk_bytes = 1048576;
  settings = options.resolve();
  EXPECT_EQ(settings.seed, 9u);
  EXPECT_EQ(settings.chunk_bytes, 1048576u);
}

TEST_F(OptionsTest, EmptyVariablesAreUnset) {
  const Environment environment({{"LOWCOMM_POLICY", ""}, {"LOWCOMM_MIN_BYTES", ""}, {"LOWCOMM_SEED", ""}});
  EXPECT_EQ(Options().resolve().min_bytes, 65536u);
  EXPECT_TRUE(Options().resolve().policy.empty());
}

TEST_F(OptionsTest, StagedWhereSomebodyAsksForIt) {
  EXPECT_FALSE(Options().resolve().encode_on_device);
  const Environment yes(std::map<std::string, std::string>{{"LOWCOMM_ENCODE_ON_DEVICE", "1"}});
  EXPECT_TRUE(Options().resolve().encode_on_device);
  Options no;
  no.encode_on_device = false;
  EXPECT_FALSE(no.resolve().encode_on_device);
}

TEST_F(OptionsTest, BadVariablesAreNamed) {
  const struct {
    const char *name, *value;
    std::vector<std::string> parts;
  } cases[] = {
      {"LOWCOMM_POLICY", "all_gather=zip", {"LOWCOMM_POLICY: ", "'zip'"}},
      {"LOWCOMM_POLICY", "barrier=qsgd8", {"LOWCOMM_POLICY: ", "unknown op 'barrier'"}},
      {"LOWCOMM_CONNECTIONS", "0", {"LOWCOMM_CONNECTIONS: expected 1 ... 64, got 0"}},
      {"LOWCOMM_ENCODE_ON_DEVICE", "2", {"LOWCOMM_ENCODE_ON_DEVICE: expected 0 ... 1, got 2"}},
      {"LOWCOMM_MIN_BYTES", "64k", {"LOWCOMM_MIN_BYTES: expected an integer, got '64k'"}},
      {"LOWCOMM_MIN_BYTES", "-1", {"LOWCOMM_MIN_BYTES: expected 0 ... ", "got -1"}},
      {"LOWCOMM_SEED", "x", {"LOWCOMM_SEED: expected an integer, got 'x'"}},
      {"LOWCOMM_SEED", "99999999999999999999", {"LOWCOMM_SEED: expected an integer"}},
      {"LOWCOMM_SEED", "1.5", {"LOWCOMM_SEED: expected an integer, got '1.5'"}},
      {"LOWCOMM_CHUNK_BYTES", "1", {"LOWCOMM_CHUNK_BYTES: expected 65536 ... 1048576, got 1"}},
      {"LOWCOMM_CHUNK_BYTES", " 1 ", {"LOWCOMM_CHUNK_BYTES: expected 65536 ... 1048576, got 1"}},
      {"LOWCOMM_CHUNK_BYTES", "65535", {"LOWCOMM_CHUNK_BYTES: expected 65536 ... 1048576, got 65535"}},
      {"LOWCOMM_CHUNK_BYTES", "1048577", {"LOWCOMM_CHUNK_BYTES: expected 65536 ... 1048576, got 1048577"}},
  };
  for (const auto& c : cases) {
    const Environment environment(std::map<std::string, std::string>{{c.name, c.value}});
    expectRefused([] { Options().resolve(); }, c.parts);
  }
}

TEST_F(OptionsTest, ReprShowsEveryField) {
  Options options;
  EXPECT_EQ(options.repr(),
            "Options(policy=None, min_bytes=None, seed=None, chunk_bytes=None, connections=None, "
            "flight_record=None, encode_on_device=None, nccl=None, timeout=None)");
  options.policy = "all_gather=qsgd8";
  options.seed = 3;
  EXPECT_EQ(options.repr(),
            "Options(policy='all_gather=qsgd8', min_bytes=None, seed=3, chunk_bytes=None, connections=None, "
            "flight_record=None, encode_on_device=None, nccl=None, timeout=None)");
}

}  // namespace
}  // namespace lowcomm
