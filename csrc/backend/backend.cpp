#include "backend/backend.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdlib>
#include <mutex>

#include "backend/store_rendezvous.h"
#include "base/error.h"
#include "engine/handshake.h"
#include "tensor/errors.h"
#include "tensor/python_state.h"
#include "transport/tcp/tcp.h"
#include "wire/frame.h"

// A group's life: handshake, connections, engine, split, time-outs, abort, shutdown.

namespace lowcomm {

namespace {

KeyValues greeting(const Settings& settings) {
  return {{
      {"wire_version", std::to_string(kWireVersion)},
      {"policy", settings.policy.str()},
      {"min_bytes", std::to_string(settings.min_bytes)},
      {"seed", std::to_string(settings.seed)},
      {"chunk_bytes", std::to_string(settings.chunk_bytes)},
      {"connections", settings.connectionsText()},
      {"secret", settings.secret ? "yes" : "no"},
      {"nccl", settings.nccl ? "1" : "0"},
  }};
}

GroupConfig configOf(const Group& group, const Settings& settings, uint32_t epoch) {
  GroupConfig config;
  config.group = group.name();
  config.global_ranks.assign(group.options->global_ranks_in_group.begin(), group.options->global_ranks_in_group.end());
  config.epoch = epoch;
  config.chunk_bytes = settings.chunk_bytes;
  config.connections = settings.turns();
  config.equal_slices = at::globalContext().deterministicAlgorithms();  // codes follow the slices, and these the links
  config.timeout = group.options->timeout;
  config.flight_record = settings.flight_record;
  if (const char* folder = std::getenv("LOWCOMM_FLIGHT_DIR")) config.flight_folder = folder;
  return config;
}

}  // namespace

LowcommBackend::LowcommBackend(StorePtr store, int rank, int size, c10::intrusive_ptr<Options> options, MakeNccl make)
    : BackendOps(rank, size, std::move(options), store, make), make_(std::move(make)) {
  Group& group = parts_.group;
  StoreRendezvous rendezvous(store);
  std::shared_ptr<tcp::Endpoint> endpoint;  // until the transport has it; what is wrong with it, peers are told
  try {
    group.resolve();
    endpoint = tcp::Endpoint::shared();
    if (group.settings().nccl && !parts_.inner_backend.get()) {
      throw ValueError("nccl: expected a torch with NCCL and a CUDA device where it is True, got none");
    }
    static std::atomic<uint64_t> groups{0};
    group.options->of_group = std::to_string(++groups);
  } catch (const std::exception& error) {  // which NCCL may throw too
    refuseHandshake(rendezvous, rank, error.what());
    std::rethrow_exception(asTorchError(std::current_exception()));
  }
  const Settings settings = group.settings();
  Handshake met = translated(
      [&] { return handshake(rendezvous, rank, size, greeting(settings), thisHost(), group.options->timeout); });
  group.hosts = std::move(met.hosts);
  NoPythonObjects guard;
  // With the group, not at its first op: an op that is issued must return at once even when a peer comes much later.
  group.open({new Engine(connect(rendezvous), configOf(group, settings, met.epoch)), UnlessForked()});
  init();
}

std::unique_ptr<Transport> LowcommBackend::connect(StoreRendezvous& rendezvous) {
  const Group& group = parts_.group;
  const auto connections = static_cast<int>(group.settings().connections);
  std::unique_ptr<Transport> transport;
  translated([&] {
    try {
      blocking([&] { transport = connectTcp(rendezvous, rank_, size_, connections, group.options->timeout); });
    } catch (const TransportError& error) {
      throw PeerError("lowcomm: making a group: rank " + std::to_string(error.peer) + ": " + error.what(), error.peer);
    }
  });
  return transport;
}

LowcommBackend::~LowcommBackend() {
  release();
}

void LowcommBackend::release() {
  Group& group = parts_.group;
  // Nobody can wait for what is left any more; an op that never ends must not keep the process from ending.
  blocking([&] {
    if (Engine* engine = group.running(); engine && !engine->drainFor(std::chrono::seconds(1))) {
      engine->abort("the group was destroyed with ops under way");
    }
  });
  parts_.blocks.leave("the group was destroyed inside a coalescing block");
  group.stop();
  blocking([&] {
    if (group.isHere()) group.callbacks->stop();
    group.close();
    parts_.inner_backend.close();
  });
  leaveRegistry();
}

bool LowcommBackend::settledBy(std::chrono::steady_clock::time_point end) {
  const auto left = [&] {
    const auto rest = std::chrono::duration_cast<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
    return std::max(rest, std::chrono::milliseconds(0));
  };
  Engine* engine = parts_.group.running();
  if (!parts_.group.isHere()) return true;
  if (engine && !engine->drainFor(left())) return false;
  if (!parts_.group.callbacks->idleWithin(left())) return false;
  end += Engine::kArrivals;
  return !engine || engine->awaitArrivals(left());
}

void LowcommBackend::breakOff() {
  if (Engine* engine = parts_.group.running()) engine->breakOff("its process ended");
}

void LowcommBackend::setTimeout(std::chrono::milliseconds timeout) {
  translated([&] { checkTimeout(timeout); });
  parts_.group.options->timeout = timeout;
  if (BackendPtr inner = parts_.inner_backend.ifMade()) inner->setTimeout(timeout);
  if (Engine* engine = parts_.group.running()) engine->setTimeout(timeout);
}

void LowcommBackend::setGroupUid(const std::string& uid) {
  c10d::Backend::setGroupUid(uid);
  if (BackendPtr inner = parts_.inner_backend.ifMade()) inner->setGroupUid(uid);
}

BackendPtr LowcommBackend::split(const StorePtr& store, const std::vector<int>& ranks,
                                 const c10::intrusive_ptr<c10d::Backend::Options>& given) {
  auto mine = std::find(ranks.begin(), ranks.end(), rank_);
  if (mine == ranks.end()) return nullptr;
  auto options = childOptions(given);
  // c10d splits once for each device type, with the same store and name, and expects one object to serve both.
  auto known = children_.find(options->group_name);
  if (known != children_.end()) {
    if (BackendPtr child = known->second.lock()) return child;
  }
  auto prefixed = c10::make_intrusive<c10d::PrefixStore>(options->group_name + "/", store);
  BackendPtr child =
      create(prefixed, static_cast<int>(mine - ranks.begin()), static_cast<int>(ranks.size()), options, make_);
  children_.insert_or_assign(options->group_name, c10::weak_intrusive_ptr<c10d::Backend>(child));
  return child;
}

BackendPtr LowcommBackend::merge(const StorePtr& store, const c10::intrusive_ptr<c10d::Backend::Options>& given,
                                 const int& rank, const int& size) {
  auto options = childOptions(given);
  auto prefixed = c10::make_intrusive<c10d::PrefixStore>(options->group_name + "/", store);
  return create(prefixed, rank, size, options, make_);
}

c10::intrusive_ptr<Options> LowcommBackend::childOptions(
    const c10::intrusive_ptr<c10d::Backend::Options>& given) const {
  auto options = c10::make_intrusive<Options>(*parts_.group.options);
  if (auto* own = dynamic_cast<Options*>(given.get())) options = c10::make_intrusive<Options>(*own);
  // c10d hands a copy of this group's own options to a split without any; its policy may have changed since.
  if (options->of_group == parts_.group.options->of_group) options->policy.reset();
  options->inherit(parts_.group.settings());
  if (given) {
    options->timeout = given->timeout;
    options->group_name = given->group_name;
    options->group_desc = given->group_desc;
    options->global_ranks_in_group = given->global_ranks_in_group;
  }
  return options;
}

void LowcommBackend::eagerConnectSingleDevice(at::Device device) {
  if (device.is_cpu()) return;
  if (BackendPtr inner = parts_.inner_backend.get()) inner->eagerConnectSingleDevice(device);
}

c10d::ErrorType LowcommBackend::getError() {
  Engine* engine = parts_.group.running();
  if (engine && !engine->endedWhy().empty()) return c10d::ErrorType::COMM_ERROR;
  const BackendPtr inner = parts_.inner_backend.ifMade();
  return inner ? inner->getError() : c10d::ErrorType::SUCCESS;
}

// The following calls go to the inner backend; without one c10d's own answer reports that none exists.
std::shared_ptr<c10::Allocator> LowcommBackend::getMemAllocator() {
  const BackendPtr inner = parts_.inner_backend.get();
  return inner ? inner->getMemAllocator() : c10d::Backend::getMemAllocator();
}

at::Tensor LowcommBackend::allocateTensor(long size, at::TensorOptions options) {
  const BackendPtr inner = options.device().is_cpu() ? nullptr : parts_.inner_backend.get();
  return inner ? inner->allocateTensor(size, options) : c10d::Backend::allocateTensor(size, options);
}

bool LowcommBackend::supportsTensorAlloc(c10::DeviceIndex device) {
  const BackendPtr inner = parts_.inner_backend.get();
  return inner && inner->supportsTensorAlloc(device);
}

void LowcommBackend::registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  const BackendPtr inner = parts_.inner_backend.get();
  inner ? inner->registerOnCompletionHook(std::move(hook)) : c10d::Backend::registerOnCompletionHook(std::move(hook));
}

void LowcommBackend::enableCollectivesTiming() {
  const BackendPtr inner = parts_.inner_backend.get();
  inner ? inner->enableCollectivesTiming() : c10d::Backend::enableCollectivesTiming();
}

void LowcommBackend::abort() {
  if (Engine* engine = parts_.group.running(/*stop=*/true))
    blocking([&] { engine->abort("aborted by the program of rank " + std::to_string(rank_)); });
  if (!parts_.group.isHere()) return;
  if (BackendPtr inner = parts_.inner_backend.ifMade()) inner->abort();
}

void LowcommBackend::shutdown() {
  parts_.group.stop();
  leaveRegistry();
  if (!parts_.group.isHere()) return;
  if (BackendPtr inner = parts_.inner_backend.ifMade()) inner->shutdown();
}

std::string LowcommBackend::flightRecord() {
  Engine* engine = parts_.group.running();
  TORCH_CHECK_WITH(DistBackendError, engine, "lowcomm: flight record of group ", parts_.group.name(),
                   ": expected a living group, got one that is gone");
  return engine->record().json();
}

namespace {

using Weak = c10::weak_intrusive_ptr<LowcommBackend>;

struct Registry {
  std::mutex mutex;
  struct Entry {
    LowcommBackend* who;  // compared only: looking through the weak pointer could make this thread the last owner
    Weak backend;
  };
  std::map<std::string, Entry> backends;
  std::map<std::string, OpStats> past;  // of groups that are gone
};

// Never destroyed: a group that lives until the process ends leaves it after static destructors began.
Registry& registry() {
  static Registry* made = new Registry;
  return *made;
}

void addTo(std::map<std::string, OpStats>& all, const Group& group) {
  for (const auto& [op, stats] : group.stats.snapshot())
    all[op].add(stats, group.options->global_ranks_in_group);
}

}  // namespace

c10::intrusive_ptr<LowcommBackend> LowcommBackend::create(StorePtr store, int rank, int size,
                                                          c10::intrusive_ptr<Options> options, MakeNccl make) {
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
  if (!std::exchange(left_, true)) addTo(registry().past, parts_.group);
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
  std::vector<c10::intrusive_ptr<LowcommBackend>> unsettled;
  blocking([&] {
    auto end = std::chrono::steady_clock::now() + patience;
    for (const std::string& name : backendNames()) {
      const auto backend = findBackend(name);
      if (backend && !backend->settledBy(end)) unsettled.push_back(backend);
    }
    for (const auto& backend : unsettled)
      backend->breakOff();
    end = std::chrono::steady_clock::now() + patience;
    for (const auto& backend : unsettled)
      backend->settledBy(end);
  });
}

std::map<std::string, OpStats> processStats() {
  std::vector<c10::intrusive_ptr<LowcommBackend>> living;  // let go of without the lock
  std::lock_guard<std::mutex> lock(registry().mutex);
  std::map<std::string, OpStats> all = registry().past;
  for (const auto& [name, entry] : registry().backends) {
    living.push_back(entry.backend.lock());
    if (living.back()) addTo(all, living.back()->group());
  }
  return all;
}

void forgetPastStats() {
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().past.clear();
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
