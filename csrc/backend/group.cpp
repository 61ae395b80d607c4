#include "backend/group.h"

#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <utility>

#include "backend/collectives.h"
#include "base/error.h"
#include "collective/collectives.h"
#include "tensor/errors.h"
#include "tensor/python_state.h"

namespace lowcomm {

Group::Group(c10d::Backend& owner, c10::intrusive_ptr<Options> options)
    : rank(owner.getRank()), size(owner.getSize()), options(std::move(options)), owner_(owner) {}

int Group::globalRank() const {
  const auto& global = options->global_ranks_in_group;
  return static_cast<size_t>(rank) < global.size() ? static_cast<int>(global[rank]) : rank;
}

void Group::resolve() {
  settings_ = options->resolve();
}

Settings Group::settings() const {
  std::lock_guard<std::mutex> lock(settings_mutex_);
  return settings_;
}

void Group::setPolicy(Policy policy) {
  std::lock_guard<std::mutex> lock(settings_mutex_);
  settings_.policy = std::move(policy);
}

std::optional<CodecSpec> Group::policyCodec(const std::string& op) const {
  std::lock_guard<std::mutex> lock(settings_mutex_);
  return settings_.policy.codec(op);
}

void Group::noteExact(const std::string& op, const std::string& because) {
  if (stats.because(op, because))
    LOG(INFO) << "lowcomm: group " << name() << ": " << op << " travels exact: " << because;
}

// The engine lives as long as the backend, so the lock need not be held while it is used.
Engine* Group::running(bool stop) {
  if (!isHere()) return nullptr;
  std::lock_guard<std::mutex> lock(engine_mutex_);
  stopped_ = stopped_ || stop;
  return engine_.get();
}

void Group::expectHere(const std::string& op) const {
  TORCH_CHECK_WITH(DistBackendError, isHere(), "lowcomm: ", op, " on group ", name(),
                   ": expected the process that made the group, ", process_.id(), ", got ", ::getpid(),
                   ", which it forked and which has none of its connections; make a group in the child");
}

Engine& Group::engine() {
  expectHere("an operation");
  Engine* engine = running();
  TORCH_CHECK_WITH(DistBackendError, engine && !stopped_, "lowcomm: group ", name(),
                   " was shut down: expected a living group");
  return *engine;
}

void Group::stop() {
  if (Engine* engine = running(/*stop=*/true)) blocking([&] { engine->shutdown(); });
}

bool Group::lives() {
  Engine* engine = running();
  return engine && !stopped_ && engine->endedWhy().empty();
}

void Group::expectLiving(const std::string& op) {
  expectHere(op);
  Engine* engine = running();
  const std::string why = engine ? engine->endedWhy() : "";
  TORCH_CHECK_WITH(DistBackendError, why.empty(), "lowcomm: ", op, " on group ", name(),
                   " of a lost group; destroy it and make a new one. First cause: ", why);
  TORCH_CHECK_WITH(DistBackendError, engine && !stopped_, "lowcomm: ", op, ": group ", name(),
                   " was shut down: expected a living group");
}

std::function<BackendPtr()> Group::living(const char* op) const {
  auto weak = c10::weak_intrusive_ptr<c10d::Backend>(BackendPtr::reclaim_copy(&owner_));
  return [weak, op] {
    BackendPtr backend = weak.lock();
    TORCH_CHECK_WITH(DistBackendError, backend, "lowcomm: ", op, ": expected a living group, got one that is gone");
    return backend;
  };
}

InnerBackend::InnerBackend(Group& group, StorePtr store, MakeNccl make)
    : group_(group), store_(std::move(store)), make_(std::move(make)) {}

void InnerBackend::close() {
  BackendPtr made;         // destroyed after the lock
  if (!group_.isHere()) {  // its threads are in the process that forked this one
    backend_.release();
    return;
  }
  store_.reset();
  std::lock_guard<std::mutex> lock(mutex_);
  asked_ = true;
  made.swap(backend_);
}

BackendPtr InnerBackend::get() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (asked_) return backend_;
  }
  // Without the lock: the maker takes the interpreter's, which the thread that asks for this one may hold.
  BackendPtr made;
  if (group_.settings().nccl) {
    NoPythonObjects guard;
    made = make_(c10::make_intrusive<c10d::PrefixStore>("device", store_), group_.rank, group_.size, group_.options);
    if (made && !group_.uid().empty()) made->setGroupUid(group_.uid());
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (!asked_) backend_ = made;  // else another thread was faster, and its own may be in use
  asked_ = true;
  return backend_;
}

BackendPtr InnerBackend::ifMade() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return backend_;
}

BackendPtr InnerBackend::of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().is_cuda() ? get() : nullptr;
}

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
  KeyValues description{{{"layouts", std::to_string(layouts.size())}}};
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
