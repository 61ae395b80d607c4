#include "seed_replay/seed_replay.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "base/error.h"
#include "base/hashes.h"
#include "kernels/isa/table.h"

namespace lowcomm {
namespace {

constexpr uint64_t kMachines[] = {3, 11, 200};

at::Tensor weight(at::ScalarType type, at::IntArrayRef shape, int seed) {
  at::Tensor w = at::empty(shape, at::kFloat);
  auto* x = w.mutable_data_ptr<float>();
  for (int64_t i = 0; i < w.numel(); ++i)
    x[i] = std::sin(static_cast<float>(i * 7 + seed)) * 0.5f;
  return w.to(type);
}

std::vector<ReplayParameter> model(at::ScalarType type) {
  return {{"a", weight(type, {61, 131}, 1), true, 0}, {"b", weight(type, {131}, 2), false, 0}};
}

SeedReplayOptions options(Noise noise) {
  SeedReplayOptions o;
  o.noise = noise;
  o.seed = 9;
  return o;
}

std::vector<std::byte> iterate(SeedReplay& core, float lr, float decay) {
  std::vector<std::vector<std::byte>> messages;
  for (const uint64_t machine : kMachines) {
    const float x = static_cast<float>(machine) * 0.01f + static_cast<float>(core.iteration());
    const float estimates[] = {x, -2 * x, std::nanf(""), 0.5f};
    messages.insert(messages.begin(), core.message(machine, estimates));
  }
  const auto record = core.record(messages, lr, decay);
  EXPECT_EQ(core.apply(record), 9u);  // the NaN takes no part
  return record;
}

class Replay : public testing::TestWithParam<std::tuple<at::ScalarType, Noise>> {};

INSTANTIATE_TEST_SUITE_P(SeedReplay, Replay,
                         testing::Combine(testing::Values(at::kFloat, at::kHalf, at::kBFloat16),
                                          testing::Values(Noise::gaussian, Noise::rademacher)));

// The formula of FORMAT.md, an iteration and a term at a time, in the stated groups of four.
TEST_P(Replay, IsTheFormula) {
  const auto [type, noise] = GetParam();
  auto parameters = model(type);
  std::vector<at::Tensor> expected;
  for (const auto& p : parameters)
    expected.push_back(p.tensor.clone());
  SeedReplay core(parameters, options(noise));
  const EstimateCodec codec("logbyte");
  for (int t = 0; t < 3; ++t) {
    const float lr = 0.02f, decay = 0.1f;
    iterate(core, lr, decay);
    std::vector<NoiseTerm> terms;
    for (const uint64_t machine : kMachines) {
      const float x = static_cast<float>(machine) * 0.01f + static_cast<float>(t);
      const float estimates[] = {x, -2 * x, std::nanf(""), 0.5f};
      const auto decoded = codec.decode(codec.encode(estimates), 4);
      for (uint64_t s = 0; s < 4; ++s) {
        if (s == 2) continue;
        terms.push_back(
            {{noiseSeed(9, machine, static_cast<uint64_t>(t), s), 0, 0}, -(lr / std::sqrt(9.0f) * decoded[s])});
      }
    }
    for (size_t i = 0; i < parameters.size(); ++i) {
      at::Tensor wide = expected[i].to(at::kFloat);
      if (parameters[i].decayed) wide.mul_(1.0f - lr * decay);
      for (auto& term : terms)
        term.key.stream = static_cast<uint32_t>(i);
      auto* x = wide.mutable_data_ptr<float>();
      addNoise(kernels(), noise, x, x, DType::float32, 0, static_cast<uint64_t>(wide.numel()), terms);
      expected[i] = wide.to(type);
    }
  }
  for (size_t i = 0; i < parameters.size(); ++i)
    EXPECT_TRUE(parameters[i].tensor.equal(expected[i])) << parameters[i].name;
}

// A log at once, and in pieces, gives the bits of iterations one by one.
TEST_P(Replay, LogGivesTheSameBits) {
  const auto [type, noise] = GetParam();
  auto lived = model(type), late = model(type), pieces = model(type);
  SeedReplay core(lived, options(noise)), joiner(late, options(noise)), other(pieces, options(noise));
  for (int t = 0; t < 300; ++t) {
    const auto record = iterate(core, 0.01f, t % 2 ? 0.1f : 0);
    if (t < 7) other.apply(record);
  }
  EXPECT_EQ(joiner.apply(core.log()), 2700u);
  EXPECT_EQ(joiner.iteration(), 300u);
  EXPECT_EQ(joiner.checksum(), core.checksum());
  EXPECT_TRUE(late[0].tensor.equal(lived[0].tensor));
  EXPECT_EQ(joiner.log(), core.log());
  size_t at = 0;
  for (int t = 0; t < 7; ++t) {
    uint32_t length;
    std::memcpy(&length, core.log().data() + at, 4);
    at += length;
  }
  other.apply(std::span(core.log()).subspan(at));
  EXPECT_EQ(other.checksum(), core.checksum());
}

// Shards of a tensor, each with its first element, move as the whole does.
TEST_P(Replay, ShardsGiveTheSameBits) {
  const auto [type, noise] = GetParam();
  auto whole = model(type);
  SeedReplay core(whole, options(noise));
  iterate(core, 0.01f, 0.1f);
  for (const int64_t cut : {1, 17, 60}) {
    auto first = model(type), second = model(type);
    first[0].tensor = first[0].tensor.slice(0, 0, cut).clone();
    second[0].tensor = second[0].tensor.slice(0, cut).clone();
    second[0].first = static_cast<uint64_t>(cut) * 131;
    SeedReplay a(first, options(noise)), b(second, options(noise));
    a.apply(core.log());
    b.apply(core.log());
    EXPECT_TRUE(at::cat({first[0].tensor, second[0].tensor}).equal(whole[0].tensor)) << cut;
    EXPECT_EQ(joinedCrc32c(a.checksums()[0], b.checksums()[0], second[0].tensor.nbytes()), core.checksums()[0]);
    first[0].whole = second[0].whole = std::vector<int64_t>{61, 131};
    SeedReplay c(first, options(noise)), d(second, options(noise));
    EXPECT_EQ(c.description(), core.description()) << "machines agree whatever their shards are";
    EXPECT_EQ(d.description(), core.description());
    second[0].first += 1;
    EXPECT_THROW(SeedReplay(second, options(noise)), ValueError);
  }
}

// A perturbed copy is what perturbing in place gives; the weights stay.
TEST_P(Replay, PerturbedIsACopy) {
  const auto [type, noise] = GetParam();
  auto parameters = model(type);
  const at::Tensor before = parameters[0].tensor.clone();
  SeedReplay core(parameters, options(noise));
  const at::Tensor copy = core.perturbed(0, 3, 1, 0.25f);
  EXPECT_TRUE(parameters[0].tensor.equal(before));
  EXPECT_FALSE(copy.equal(before));
  core.perturb(3, 1, 0.25f);
  EXPECT_TRUE(copy.equal(parameters[0].tensor));
}

TEST(SeedReplay, ALayoutOfMemoryIsNotPartOfTheModel) {
  auto rows = model(at::kFloat), columns = model(at::kFloat);
  columns[0].tensor = columns[0].tensor.t().contiguous().t();
  SeedReplay a(rows, options(Noise::gaussian)), b(columns, options(Noise::gaussian));
  iterate(a, 0.01f, 0);
  iterate(b, 0.01f, 0);
  EXPECT_TRUE(rows[0].tensor.equal(columns[0].tensor));
  EXPECT_EQ(a.checksum(), b.checksum());
}

TEST(SeedReplay, WhatIsRefusedChangesNothing) {
  auto parameters = model(at::kFloat);
  SeedReplay core(parameters, options(Noise::rademacher));
  iterate(core, 0.01f, 0);
  const uint32_t before = core.checksum();
  const auto good = core.record({core.message(3, {})}, 0.01f, 0);
  const float one = 1;
  const auto message = core.message(3, {&one, 1});
  EXPECT_THROW(core.record({message, message}, 0.01f, 0), ValueError);  // a machine twice
  auto spoilt = good;
  spoilt[20] ^= std::byte{1};
  EXPECT_THROW(core.apply(spoilt), ValueError);
  EXPECT_THROW(core.apply(core.log()), ValueError);  // of iteration 0
  auto log = good;
  log.insert(log.end(), spoilt.begin(), spoilt.end());
  EXPECT_THROW(core.apply(log), ValueError);                    // nor is the first, good one applied
  EXPECT_THROW(core.record({}, std::nanf(""), 0), ValueError);  // found before anybody agrees on it
  EXPECT_THROW(core.apply(writeReplayRecord({1, 0.01f, INFINITY, {}})), ValueError);
  EXPECT_EQ(core.iteration(), 1u);
  auto others = model(at::kFloat);
  SeedReplay forgetful(others, options(Noise::rademacher));
  for (int t = 0; t < 5; ++t)
    iterate(forgetful, 0.01f, 0);
  forgetful.forgetLog(3);
  ASSERT_EQ(ReplayRecords(forgetful.log()).read().size(), 2u);
  EXPECT_EQ(ReplayRecords(forgetful.log()).read()[0].iteration, 3u);
  EXPECT_EQ(ReplayRecords(forgetful.logFrom(4)).read().size(), 1u);
  EXPECT_EQ(core.checksum(), before);
  core.apply(good);
  EXPECT_THROW(core.record({message}, 0.01f, 0), ValueError);  // of an iteration that is over
  SeedReplayOptions other = options(Noise::rademacher);
  other.codec = "none";
  SeedReplay wide(model(at::kFloat), other);
  auto misfit = model(at::kFloat);
  SeedReplay narrow(misfit, options(Noise::rademacher));
  EXPECT_THROW(narrow.apply(wide.record({wide.message(3, {&one, 1})}, 0.01f, 0)),
               ValueError);  // another codec's length
}

TEST(SeedReplay, SignsAndOtherCodecsComeBack) {
  const std::vector<float> x = {0.0f, 1.5f, -3.25f, 1e-3f, -1e-3f};
  EXPECT_EQ(EstimateCodec("none").decode(EstimateCodec("none").encode(x), 5), x);
  EXPECT_EQ(EstimateCodec("sign1").decode(EstimateCodec("sign1").encode(x), 5), (std::vector<float>{0, 1, -1, 1, -1}));
  EXPECT_EQ(EstimateCodec("sign1").bytes(5), 2u);
  EXPECT_EQ(EstimateCodec("logbyte").bytes(5), 5u);
  EXPECT_EQ(EstimateCodec("log9").bytes(5), 6u);
  const float many[] = {1, -2, 3, -4, 5, -6, 7, -8, 9};
  const auto nine = EstimateCodec("log9").decode(EstimateCodec("log9").encode(many), 9);
  for (size_t i = 0; i < 9; ++i)
    EXPECT_NEAR(nine[i], many[i], 0.033f * std::fabs(many[i])) << i;
  for (const char* name : {"logbyte", "log9", "fp16", "none", "sign1"}) {
    const EstimateCodec codec(name);
    const float odd[] = {INFINITY, std::nanf(""), 1.0f};
    const auto back = codec.decode(codec.encode(odd), 3);
    EXPECT_FALSE(std::isfinite(back[0]) || std::isfinite(back[1])) << name;
    EXPECT_NEAR(back[2], 1.0f, 0.07f) << name;
  }
}

// A quantized base moves by the pool's sums: after many iterations as far as weights that are written.
TEST(SeedReplay, AQuantizedBaseMovesBySums) {
  for (const auto& [kind, bound] : {std::pair<const char*, float>{"int8", 0.01f}, {"nf4", 0.12f}}) {
    auto plain = model(at::kFloat);
    SeedReplayOptions o = options(Noise::rademacher);
    o.pool = 8;
    SeedReplay written(plain, o);
    const at::Tensor start = plain[0].tensor.clone();
    o.base = kind;
    SeedReplay kept(model(at::kFloat), o);
    const at::Tensor base = kept.perturbed(0, 0, 0, 0);
    EXPECT_LT((base - start).norm().item<float>(), bound * start.norm().item<float>()) << kind;
    for (int t = 0; t < 50; ++t)
      kept.apply(iterate(written, 0.01f, 0));
    const at::Tensor moved = kept.perturbed(0, 0, 0, 0) - base, expected = plain[0].tensor - start;
    EXPECT_LT((moved - expected).norm().item<float>(), 1e-4f * expected.norm().item<float>()) << kind;
    EXPECT_NE(kept.checksum(), 0u);
  }
}

TEST(SeedReplay, ChecksAMessageWithoutARecord) {
  SeedReplay core(model(at::kFloat), options(Noise::rademacher));
  const auto message = core.message(7, std::vector<float>{0.5f, 1.0f});
  core.checkMessage(7, message);
  EXPECT_THROW(core.checkMessage(8, message), ValueError);
  EXPECT_THROW(core.checkMessage(7, std::span(message).first(message.size() - 1)), ValueError);
  auto spoilt = message;
  spoilt[3] ^= std::byte{1};
  EXPECT_THROW(core.checkMessage(7, spoilt), ValueError);
  const auto long_payload = writeReplayMessage({7, 0, 1, std::span(message).subspan(18, 2)});
  EXPECT_THROW(core.checkMessage(7, long_payload), ValueError);
  core.setIteration(1);
  EXPECT_THROW(core.checkMessage(7, message), ValueError);
}

TEST(SeedReplay, ChecksRatesWithoutARecord) {
  const SeedReplay core(model(at::kFloat), options(Noise::rademacher));
  core.checkRates(0.1f, 0.01f);
  EXPECT_THROW(core.checkRates(std::nanf(""), 0.0f), ValueError);
  EXPECT_THROW(core.checkRates(0.1f, HUGE_VALF), ValueError);
}

}  // namespace
}  // namespace lowcomm
