#include "backend/agreements.h"

#include "base/error.h"
#include "collective/agree.h"
#include "tensor/errors.h"

namespace lowcomm {

namespace {

// A rank with a mistake of its own (`mine`) tells its peers before it throws: they are in the same call.
void agreeOn(GroupParts& parts, const std::string& op, const KeyValues& description, std::exception_ptr mine) {
  try {
    if (parts.group.size > 1)
      parts.issuer.runAndWait(op, parts.blocks.takeNumbers(1),
                              [description](OpContext& context) { agree(context, description); });
  } catch (...) {
    if (!mine) throw;
  }
  if (mine) std::rethrow_exception(mine);
}

}  // namespace

void setPolicy(GroupParts& parts, const std::string& text) {
  Policy policy;
  KeyValues description;
  std::exception_ptr mine;
  try {
    policy = Policy::parse(text);
    description.fields = {{"policy", policy.str()}};
  } catch (const ValueError& error) {
    mine = asTorchError(std::current_exception());
    description.fields = {{"error", error.what()}};
  }
  agreeOn(parts, "set_policy", description, mine);
  parts.group.setPolicy(std::move(policy));
}

void agreeOnLayouts(GroupParts& parts, const std::vector<std::pair<std::string, Layout>>& layouts,
                    const std::string& error) {
  // All of them in one message. Their texts may not fit it: the hashes always do for any model there is, and as much
  // text as there is room for says where to look.
  constexpr size_t kRoom = 30000;
  KeyValues description;
  description.fields = {{"layouts", std::to_string(layouts.size())}};
  uint64_t all = 0;
  size_t room = kRoom;
  for (const auto& [name, layout] : layouts) {
    all = all * 0x9e3779b97f4a7c15ull + layout.hash();
    const std::string text = layout.text();
    if (text.size() + name.size() > room) continue;
    room -= text.size() + name.size();
    description.fields.emplace_back(name, text);
  }
  description.fields.emplace_back("hash of all layouts", std::to_string(all));
  agreeOnTexts(parts, "agreement on layouts", std::move(description.fields), error);
}

void agreeOnTexts(GroupParts& parts, const std::string& what, std::vector<std::pair<std::string, std::string>> fields,
                  const std::string& error) {
  KeyValues description;
  description.fields = std::move(fields);
  if (error.empty()) return agreeOn(parts, what, description, nullptr);
  description.fields = {{"error", error.substr(0, 1000)}};
  try {
    agreeOn(parts, what, description, nullptr);
  } catch (const c10::DistBackendError&) {
    // The caller throws its own error.
  }
}

}  // namespace lowcomm
