// A model that several ranks hold: its pieces and stripes, and their ways inside a site.
#include "diloco/site_model.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/error.h"
#include "diloco_ranks.h"

namespace lowcomm::test {
namespace {

// One parameter of each kind: cut into rows, small, without a dimension, 16 bits.
std::vector<at::Tensor> wholes() {
  return {at::arange(300 * 100, at::kFloat).view({300, 100}), at::arange(7, at::kFloat), at::full({}, 3.5),
          at::arange(24, at::kBFloat16).view({6, 4})};
}

using Layouts = std::vector<std::vector<OuterParameter>>;  // by rank

// The part [begin, end) along a dimension of each parameter that has it; of others all.
std::vector<OuterParameter> part(int64_t dim, double begin, double end) {
  std::vector<OuterParameter> held;
  const auto all = wholes();
  for (size_t i = 0; i < all.size(); ++i) {
    const std::string name = "p" + std::to_string(i);
    if (all[i].dim() <= dim) {
      held.push_back({name, all[i].clone()});
      continue;
    }
    const auto from = static_cast<int64_t>(begin * all[i].size(dim)), to = static_cast<int64_t>(end * all[i].size(dim));
    std::vector<int64_t> offset(all[i].dim(), 0);
    offset[dim] = from;
    held.push_back({name, all[i].narrow(dim, from, to - from).clone(), all[i].sizes().vec(), offset});
  }
  return held;
}

std::vector<OuterParameter> rows(double begin, double end) {
  return part(0, begin, end);
}

// As of tensor parallelism.
std::vector<OuterParameter> columns(double begin, double end) {
  return part(1, begin, end);
}

std::vector<Layouts> layouts() {
  return {
      {rows(0, 1), rows(0, 1)},                                  // DDP
      {rows(0, 0.5), rows(0.5, 1)},                              // FSDP2
      {rows(0, 0.1), rows(0.1, 0.1), rows(0.1, 1)},              // uneven, and one rank with nothing
      {rows(0, 0.5), rows(0.5, 1), rows(0, 0.5), rows(0.5, 1)},  // HSDP
      {columns(0, 0.25), columns(0.25, 1)},                      // tensor parallel
  };
}

TEST(SiteModel, BringsEveryElementToItsStripeAndBack) {
  for (const Layouts& layout : layouts()) {
    for (int stripes : {1, 2, 3, 5}) {
      const int size = static_cast<int>(layout.size());
      Ranks ranks(size);
      std::vector<std::string> texts(size);
      std::vector<std::vector<int>> carried(size);
      onRanks(ranks, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
        std::vector<OuterParameter> held = layout[rank];
        for (OuterParameter& p : held)
          p.tensor = p.tensor.clone();
        SiteModel model(held, {queue, std::vector<int>(size, 0), {stripes}}, 2, 0, /*same_values=*/true);
        texts[rank] = model.text();
        carried[rank] = model.stripes();
        const auto all = wholes();
        for (int64_t fragment = 0; fragment < 2; ++fragment) {
          model.collect(fragment);
          for (size_t stripe = 0; stripe < model.stripes().size(); ++stripe) {
            for (const OuterParameter& piece : model.pieces(stripe, fragment)) {
              at::Tensor whole = all[piece.name[1] - '0'];
              const size_t cut = piece.name.find('[');
              if (cut != std::string::npos)
                whole = whole.narrow(0, std::stoll(piece.name.substr(cut + 1)), piece.tensor.size(0));
              EXPECT_TRUE(at::equal(piece.tensor, whole)) << piece.name;
              piece.tensor.mul_(2);
            }
          }
          model.spread(fragment);
        }
        for (size_t i = 0; i < held.size(); ++i)
          EXPECT_TRUE(at::equal(held[i].tensor, layout[rank][i].tensor * 2)) << size << " ranks, " << held[i].name;
        int64_t elements = 0;
        for (int64_t one : model.stripeElements())
          elements += one;
        EXPECT_EQ(elements, 300 * 100 + 7 + 1 + 24);
      });
      std::vector<int> all;
      for (const auto& one : carried)
        all.insert(all.end(), one.begin(), one.end());
      std::sort(all.begin(), all.end());
      ASSERT_EQ(all.size(), static_cast<size_t>(stripes)) << "every stripe is carried once";
      for (int stripe = 0; stripe < stripes; ++stripe)
        EXPECT_EQ(all[stripe], stripe);
      for (const std::string& text : texts)
        EXPECT_EQ(text, texts[0]);
    }
  }
}

TEST(SiteModel, PartsHaveTheirOwnNames) {
  Ranks ranks(3);
  onRanks(ranks, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
    // Ranks 0 and 2 hold one stage; rank 1 another, of the same names and other values.
    const at::Tensor own = at::full({5}, rank == 1 ? 7.0 : 1.0);
    SiteModel model({{"p", own}}, {queue, {0, 1, 0}, {}}, 1, 0, true);
    EXPECT_EQ(model.isOfPart(2), rank != 1);
    EXPECT_EQ(model.stripes().front(), rank == 1 ? 2 : rank == 0 ? 0 : 1);
    model.collect(0);
    if (rank == 1) model.pieces(0, 0)[0].tensor.fill_(8);
    model.spread(0);
    EXPECT_EQ(own[0].item<float>(), rank == 1 ? 8 : 1);
  });
}

// The texts in which ranks hear of a mistake, by rank; rank 1 holds `other`.
std::vector<std::string> refusals(const std::vector<OuterParameter>& first, const std::vector<OuterParameter>& other) {
  std::vector<std::string> errors(2);
  Ranks ranks(2);
  onRanks(ranks, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
    errors[rank] = thrownBy<ValueError>([&] { SiteModel(rank == 0 ? first : other, {queue, {0, 0}, {}}, 1, 0, true); });
  });
  return errors;
}

TEST(SiteModel, RefusesOnAllRanksWhatDoesNotFit) {
  const at::Tensor five = at::zeros({5});
  const std::vector<OuterParameter> whole = {{"p", five}};
  const auto expect = [&](const std::vector<OuterParameter>& other, const std::vector<std::string>& parts) {
    for (const std::string& error : refusals(whole, other))
      EXPECT_TRUE(holds(error, parts)) << error;
  };
  expect({{"p", at::ones({5})}}, {"p: expected replicas in a site to hold equal values", "on rank 0", "on rank 1"});
  expect({{"p", at::zeros({6})}}, {"p: expected Float of shape [5]", "got Float of shape [6] on rank 1"});
  expect({{"p", five.to(at::kBFloat16)}}, {"got BFloat16 of shape [5] on rank 1"});
  expect({{"p", at::zeros({2}), {5}, {0}}}, {"hold each of its 5 elements once, or in equal boxes, got 7"});
  expect({{"p", five}, {"q", at::zeros({2}), {4}, {0}}}, {"q: expected", "4 elements", "got 2"});
  expect({{"p", five}, {"p", five}}, {"expected different names, got 'p' twice on rank 1"});
}

}  // namespace
}  // namespace lowcomm::test
