#include "collective/link_shares.h"

#include <algorithm>
#include <charconv>
#include <numeric>

#include "base/error.h"
#include "transport/transport.h"

namespace lowcomm {
namespace {

constexpr double kLeastBusyS = 0.5;
constexpr uint64_t kLeastBytes = 512 << 10;
constexpr double kFastest = 250e6;  // bytes/s to a peer: what is faster waits for the codecs, not for the link

// Whether `now` is within a quarter of `before`.
bool isNear(uint64_t now, uint64_t before) {
  return 4 * (std::max(now, before) - std::min(now, before)) <= before;
}

}  // namespace

LinkShares::LinkShares(int ranks, bool equal) : equal_(equal), before_(ranks), rates_(ranks) {}

bool LinkShares::isDue() {
  const auto now = std::chrono::steady_clock::now();
  if (equal_ || now - asked_ < std::chrono::milliseconds(100)) return false;
  asked_ = now;
  return true;
}

void LinkShares::measure(const std::vector<ConnectionReport>& connections) {
  std::vector<Carried> now(before_.size());
  for (const ConnectionReport& one : connections) {
    if (one.lane != Lane::bulk) continue;
    now[one.peer].bytes += one.acknowledged_bytes;
    now[one.peer].busy_s = std::max(now[one.peer].busy_s, one.busy_s);
  }
  double longest = 0;
  for (size_t peer = 0; peer < now.size(); ++peer) {
    Carried& before = before_[peer];
    const bool is_new = now[peer].bytes < before.bytes || now[peer].busy_s < before.busy_s;  // connected again
    if (is_new) before = {};
    longest = std::max(longest, now[peer].busy_s - before.busy_s);
  }
  if (equal_ || longest < kLeastBusyS) return;
  for (size_t peer = 0; peer < now.size(); ++peer) {
    const uint64_t bytes = now[peer].bytes - before_[peer].bytes;
    if (bytes < kLeastBytes) continue;
    const double busy_s = std::max(now[peer].busy_s - before_[peer].busy_s, 1e-6);
    const auto rate = static_cast<uint64_t>(std::min(static_cast<double>(bytes) / busy_s, kFastest) / 1024) + 1;
    rates_[peer] = rates_[peer] == 0 ? rate : (rates_[peer] + rate) / 2;
    before_[peer] = now[peer];
  }
}

std::string LinkShares::text() const {
  std::string text;
  for (const uint64_t rate : rates_)
    text += (text.empty() ? "" : " ") + std::to_string(rate);
  return std::ranges::count(rates_, 0u) == static_cast<std::ptrdiff_t>(rates_.size()) ? "" : text;
}

std::vector<uint64_t> LinkShares::parse(std::string_view text, size_t ranks) {
  std::vector<uint64_t> rates;
  const char *at = text.data(), *const end = at + text.size();
  while (at != end && rates.size() < ranks) {
    uint32_t rate = 0;
    const auto [next, error] = std::from_chars(at, end, rate);
    if (error != std::errc() || (next != end && (*next != ' ' || next + 1 == end))) break;
    rates.push_back(rate);
    at = next == end ? end : next + 1;
  }
  if (at != end || rates.size() != ranks)
    throw WireError("rates: expected " + std::to_string(ranks) + " numbers, got '" + std::string(text.substr(0, 100)) +
                    "'");
  return rates;
}

void LinkShares::agree(const std::vector<std::vector<uint64_t>>& rates) {
  const size_t ranks = rates.size();
  std::vector<uint64_t> sums(ranks);
  for (size_t i = 0; i < ranks; ++i) {
    uint64_t sent = 0, received = 0;
    for (size_t j = 0; j < ranks; ++j) {
      if (i == j) continue;
      if (rates[i][j] == 0) return;
      sent += rates[i][j];
      received += rates[j][i];
    }
    sums[i] = std::min(sent, received);
  }
  if (!agreed_.empty() && std::equal(sums.begin(), sums.end(), agreed_.begin(), isNear)) return;
  agreed_ = sums;
  weights_.clear();
  const auto [least, most] = std::ranges::minmax(sums);
  if (isNear(most, least)) return;
  const uint64_t all = std::accumulate(sums.begin(), sums.end(), uint64_t{0}), ways = 2 * ranks - 2;
  for (const uint64_t rate : sums)
    weights_.push_back(ways * least >= all ? ways * rate - all : rate - least);
}

}  // namespace lowcomm
