#include <map>
#include <mutex>

#include "backend/backend.h"
#include "tensor/python_state.h"

namespace lowcomm {
namespace {

using Weak = c10::weak_intrusive_ptr<LowcommBackend>;

struct Registry {
  std::mutex mutex;
  struct Entry {
    LowcommBackend* who;  // compared only: looking through the weak pointer could make this thread the last owner
    Weak backend;
  };
  std::map<std::string, Entry> backends;
};

// Never destroyed: a group that lives until the process ends leaves it after static destructors began.
Registry& registry() {
  static Registry* made = new Registry;
  return *made;
}

}  // namespace

c10::intrusive_ptr<LowcommBackend> LowcommBackend::create(StorePtr store, int rank, int size,
                                                          c10::intrusive_ptr<Options> options, InnerMakers make) {
  auto made = c10::make_intrusive<LowcommBackend>(std::move(store), rank, size, std::move(options), std::move(make));
  Registry::Entry entry{made.get(), Weak(made)};
  std::lock_guard<std::mutex> lock(registry().mutex);
  // Swapped: dropping what stood there may run a destructor, which takes the lock.
  auto [at, fresh] = registry().backends.try_emplace(made->group().name(), entry);
  if (!fresh) std::swap(at->second, entry);
  return made;
}

void LowcommBackend::leaveRegistry() {
  Registry::Entry entry{nullptr, Weak(c10::intrusive_ptr<LowcommBackend>())};
  std::lock_guard<std::mutex> lock(registry().mutex);
  auto found = registry().backends.find(parts_.group.name());
  // A later group may have taken the name.
  if (found == registry().backends.end() || found->second.who != this) return;
  std::swap(found->second, entry);
  registry().backends.erase(found);
}

c10::intrusive_ptr<LowcommBackend> findBackend(const std::string& group_name) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  auto found = registry().backends.find(group_name);
  return found == registry().backends.end() ? c10::intrusive_ptr<LowcommBackend>() : found->second.backend.lock();
}

void settleBackends(std::chrono::milliseconds patience) {
  const auto end = std::chrono::steady_clock::now() + patience;
  for (const std::string& name : backendNames()) {
    if (const auto backend = findBackend(name)) blocking([&] { backend->settledBy(end); });
  }
}

std::vector<std::string> backendNames() {
  std::lock_guard<std::mutex> lock(registry().mutex);
  std::vector<std::string> names;
  for (const auto& [name, entry] : registry().backends) {
    if (!entry.backend.expired()) names.push_back(name);
  }
  return names;
}

}  // namespace lowcomm
