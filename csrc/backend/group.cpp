#include "backend/group.h"

#include <c10/util/Logging.h>

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
  std::lock_guard<std::mutex> lock(engine_mutex_);
  stopped_ = stopped_ || stop;
  return engine_.get();
}

Engine& Group::engine() {
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

}  // namespace lowcomm
