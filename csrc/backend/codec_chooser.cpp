#include "backend/codec_chooser.h"

#include "base/hashes.h"

namespace lowcomm {

namespace {

thread_local std::vector<std::shared_ptr<std::atomic<bool>>> scopes;

}  // namespace

void ExactScope::enter() {
  open_ = std::make_shared<std::atomic<bool>>(true);
  scopes.push_back(open_);
}

void ExactScope::leave() {
  if (open_) *open_ = false;
  open_.reset();
  std::erase_if(scopes, [](const auto& open) { return !*open; });
}

bool ExactScope::active() {
  std::erase_if(scopes, [](const auto& open) { return !*open; });  // those that were left on another thread
  return !scopes.empty();
}

ReasonExact CodecChooser::reasonAgainst(at::ScalarType type) {
  if (ExactScope::active()) return {"inside lc.exact()"};
  if (type == at::kFloat || type == at::kHalf || type == at::kBFloat16) return {};
  return {std::string("dtype ") + c10::toString(type)};
}

CodecChoice CodecChooser::choose(const std::string& op, const at::Tensor& tensor, uint64_t raw_bytes) const {
  const std::optional<CodecSpec> codec = group_.policyCodec(op);
  if (!codec) return ReasonExact{};
  ReasonExact reason = reasonAgainst(tensor.scalar_type());
  if (!reason.text.empty()) return reason;
  if (raw_bytes < group_.minBytes()) return ReasonExact{"under min_bytes"};
  if (auto misfit = untaken(*codec, {tensor.sizes().data(), tensor.sizes().size()})) return ReasonExact{*misfit};
  return tensor.dim() == 0 ? *codec : codec->withChannels(static_cast<uint64_t>(tensor.size(-1)));
}

CodecSpec CodecChooser::codecOf(const std::string& op, const at::Tensor& tensor, uint64_t raw_bytes,
                                const std::string& counted_as) {
  const CodecChoice choice = choose(op, tensor, raw_bytes);
  if (const auto* codec = std::get_if<CodecSpec>(&choice)) return *codec;
  const std::string& reason = std::get<ReasonExact>(choice).text;
  if (!reason.empty()) group_.noteExact(counted_as, reason);
  return {};
}

std::vector<CodecSpec> CodecChooser::codecsOf(const std::string& op, const std::vector<at::Tensor>& tensors) {
  uint64_t contribution = 0;
  for (const auto& tensor : tensors)
    contribution += tensor.nbytes();
  std::vector<CodecSpec> codecs;
  for (const auto& tensor : tensors)
    codecs.push_back(codecOf(op, tensor, contribution));
  return codecs;
}

std::vector<CodecSpec> CodecChooser::codecsOfParts(const std::string& op, const std::vector<at::Tensor>& parts,
                                                   uint64_t contribution) {
  std::vector<CodecSpec> codecs;
  for (const auto& part : parts) {
    codecs.push_back(codecOf(op, part, contribution));
    if (codecs.back().id == CodecId::none) return std::vector<CodecSpec>(parts.size());
  }
  return codecs;
}

uint64_t DrawCounter::key() const {
  // splitmix64: neighbouring seeds and names give unrelated keys.
  uint64_t key = group_.settings().seed + fnv1a(group_.name()) + 0x9e3779b97f4a7c15ull;
  key = (key ^ (key >> 30)) * 0xbf58476d1ce4e5b9ull;
  key = (key ^ (key >> 27)) * 0x94d049bb133111ebull;
  return key ^ (key >> 31);
}

Draws DrawCounter::ofStep(uint32_t step) const {
  return {key(), streamOf(group_.globalRank(), 0), step};
}

}  // namespace lowcomm
