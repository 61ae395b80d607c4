// A group's life: hands, engine, split, timeouts, abort, shutdown.
#include "backend/backend.h"

#include <c10/util/Logging.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "backend/c10d_transport.h"
#include "backend/exact_scope.h"
#include "backend/handshake.h"
#include "base/fnv1a.h"
#include "tensor/errors.h"
#include "tensor/python_state.h"
#include "wire/frame.h"

namespace lowcomm {
namespace {

KeyValues greeting(const Settings& settings) {
  KeyValues hello;
  hello.fields = {
      {"wire_version", std::to_string(kWireVersion)},        {"policy", settings.policy.str()},
      {"min_bytes", std::to_string(settings.min_bytes)},     {"seed", std::to_string(settings.seed)},
      {"chunk_bytes", std::to_string(settings.chunk_bytes)}, {"connections", std::to_string(settings.connections)},
      {"ring_from", std::to_string(settings.ring_from)},     {"nccl", settings.ncclText()},
  };
  return hello;
}

}  // namespace

LowcommBackend::LowcommBackend(StorePtr store, int rank, int size, c10::intrusive_ptr<Options> options, MakeInner make)
    : c10d::Backend(rank, size), store_(std::move(store)), options_(std::move(options)), make_(std::move(make)) {
  try {
    settings_ = options_->resolve();
    if (settings_.nccl == true && !forDevices()) {
      throw ValueError("nccl: expected a torch with NCCL and a CUDA device where it is True, got none");
    }
    static std::atomic<uint64_t> groups{0};
    options_->of_group = std::to_string(++groups);
  } catch (const ValueError& error) {
    refuseHands(*store_, rank, error.what());
    std::rethrow_exception(asTorchError(std::current_exception()));
  }
  translated([&] { epoch_ = handshake(*store_, rank, size, greeting(settings_), options_->timeout); });
  NoPythonObjects guard;
  host_ = make_(Role::host, store_, rank, size, options_, 1);
  connect();
  init();
}

LowcommBackend::~LowcommBackend() {
  release();
}

void LowcommBackend::release() {
  // Nobody can wait for what is left any more; an op that never ends must not keep the process from ending.
  blocking([&] {
    if (engine_ && !engine_->drainFor(std::chrono::seconds(1))) {
      engine_->abort("the group was destroyed with ops under way");
    }
  });
  leaveBlock("the group was destroyed inside a coalescing block");
  stop();
  blocking([&] {
    callbacks_->stop();
    engine_.reset();
    host_.reset();
    store_.reset();
    BackendPtr device;  // goes after the lock
    std::lock_guard<std::mutex> lock(device_mutex_);
    device_asked_ = true;
    device.swap(device_);
  });
  leaveRegistry();
}

bool LowcommBackend::settledBy(std::chrono::steady_clock::time_point end) {
  const auto left = [&] {
    const auto rest = std::chrono::duration_cast<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
    return std::max(rest, std::chrono::milliseconds(0));
  };
  Engine* engine = running();
  return (!engine || engine->drainFor(left())) && callbacks_->idleWithin(left());
}

// The engine if there is one; it lives as long as the backend, so the lock need not be held while it is used.
Engine* LowcommBackend::running(bool stop) {
  std::lock_guard<std::mutex> lock(engine_mutex_);
  stopped_ = stopped_ || stop;
  return engine_.get();
}

void LowcommBackend::stop() {
  if (Engine* engine = running(/*stop=*/true)) blocking([&] { engine->shutdown(); });
}

Engine& LowcommBackend::engine() {
  Engine* engine = running();
  TORCH_CHECK_WITH(DistBackendError, engine && !stopped_, "lowcomm: group ", groupName(),
                   " was shut down: expected a living group");
  return *engine;
}

// The inner backend of CUDA tensors, or null where there is none. Made when the first of them comes, on each rank by
// itself: its constructor talks to nobody, and a process that has none must not wake the CUDA driver, nor end with its
// threads.
BackendPtr LowcommBackend::forDevices() {
  {
    std::lock_guard<std::mutex> lock(device_mutex_);
    if (device_asked_) return device_;
  }
  // Without the lock: the maker takes the interpreter's, which who asks for this one may hold.
  BackendPtr made;
  if (settings().nccl != false) {
    NoPythonObjects guard;
    made = make_(Role::device, store_, rank_, size_, options_, 1);
    if (made && !getGroupUid().empty()) made->setGroupUid(getGroupUid());
  }
  std::lock_guard<std::mutex> lock(device_mutex_);
  if (!device_asked_) device_ = made;  // else another thread was faster, and its own may be in use
  device_asked_ = true;
  return device_;
}

BackendPtr LowcommBackend::madeForDevices() const {
  std::lock_guard<std::mutex> lock(device_mutex_);
  return device_;
}

// With the group, not at its first op: an op that is issued must return at once even when a peer comes much later.
void LowcommBackend::connect() {
  auto lane = [&](const char* name, uint64_t connections) {
    auto prefixed = c10::make_intrusive<c10d::PrefixStore>(std::string("lowcomm/lane/") + name, store_);
    return make_(Role::lane, prefixed, rank_, size_, options_, static_cast<int>(connections));
  };
  BackendPtr control = lane("control", 1);  // in an order that every rank shares: both wait for all ranks
  BackendPtr bulk = lane("bulk", settings_.connections);
  GroupConfig config;
  config.group = groupName();
  config.global_ranks.assign(options_->global_ranks_in_group.begin(), options_->global_ranks_in_group.end());
  config.epoch = epoch_;
  config.chunk_bytes = settings_.chunk_bytes;
  config.connections = static_cast<int>(settings_.connections);
  config.ring_from = static_cast<int>(std::min<uint64_t>(settings_.ring_from, INT_MAX));
  config.timeout = options_->timeout;
  config.flight_record = settings_.flight_record;
  if (const char* folder = std::getenv("LOWCOMM_FLIGHT_DIR")) config.flight_folder = folder;
  engine_ =
      std::make_shared<Engine>(std::make_unique<C10dTransport>(std::move(control), std::move(bulk)), std::move(config));
}

Settings LowcommBackend::settings() const {
  std::lock_guard<std::mutex> lock(settings_mutex_);
  return settings_;
}

uint64_t LowcommBackend::reserveSlots(uint64_t count) {
  return kLayoutSlots + slots_.fetch_add(count);
}

uint64_t LowcommBackend::drawKey() const {
  // splitmix64: neighbouring seeds and names give unrelated keys.
  uint64_t key = settings().seed + fnv1a(groupName()) + 0x9e3779b97f4a7c15ull;
  key = (key ^ (key >> 30)) * 0xbf58476d1ce4e5b9ull;
  key = (key ^ (key >> 27)) * 0x94d049bb133111ebull;
  return key ^ (key >> 31);
}

void LowcommBackend::noteExact(const std::string& op, const std::string& because) {
  if (stats_.because(op, because))
    LOG(INFO) << "lowcomm: group " << groupName() << ": " << op << " travels exact: " << because;
}

void LowcommBackend::setTimeout(std::chrono::milliseconds timeout) {
  translated([&] { checkTimeout(timeout); });
  options_->timeout = timeout;
  host_->setTimeout(timeout);
  if (BackendPtr device = madeForDevices()) device->setTimeout(timeout);
  if (Engine* engine = running()) engine->setTimeout(timeout);
}

void LowcommBackend::setGroupUid(const std::string& uid) {
  c10d::Backend::setGroupUid(uid);
  host_->setGroupUid(uid);
  if (BackendPtr device = madeForDevices()) device->setGroupUid(uid);
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
  auto options = c10::make_intrusive<Options>(*options_);
  if (auto* own = dynamic_cast<Options*>(given.get())) options = c10::make_intrusive<Options>(*own);
  // c10d hands a copy of this group's own options to a split without any; its policy may have changed since.
  if (options->of_group == options_->of_group) options->policy.reset();
  options->inherit(settings());
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
  if (BackendPtr inner = forDevices()) inner->eagerConnectSingleDevice(device);
}

c10d::ErrorType LowcommBackend::getError() {
  if (BackendPtr device = madeForDevices()) return device->getError();
  Engine* engine = running();
  return engine && !engine->endedWhy().empty() ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

std::shared_ptr<c10::Allocator> LowcommBackend::getMemAllocator() {
  BackendPtr device = forDevices();
  return (device ? device : host_)->getMemAllocator();
}

at::Tensor LowcommBackend::allocateTensor(long size, at::TensorOptions options) {
  BackendPtr device = options.device().is_cpu() ? nullptr : forDevices();
  return (device ? device : host_)->allocateTensor(size, options);
}

bool LowcommBackend::supportsTensorAlloc(c10::DeviceIndex device) {
  BackendPtr inner = forDevices();
  return inner && inner->supportsTensorAlloc(device);
}

void LowcommBackend::registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  BackendPtr device = forDevices();
  (device ? device : host_)->registerOnCompletionHook(std::move(hook));
}

void LowcommBackend::waitForPendingWorks() {
  if (Engine* engine = running()) blocking([&] { engine->drain(); });
  if (BackendPtr device = madeForDevices()) device->waitForPendingWorks();
}

void LowcommBackend::enableCollectivesTiming() {
  BackendPtr device = forDevices();
  (device ? device : host_)->enableCollectivesTiming();
}

void LowcommBackend::abort() {
  if (Engine* engine = running(/*stop=*/true))
    blocking([&] { engine->abort("aborted by the program of rank " + std::to_string(rank_)); });
  host_->abort();
  if (BackendPtr device = madeForDevices()) device->abort();
}

void LowcommBackend::shutdown() {
  stop();
  leaveRegistry();
  host_->shutdown();
  if (BackendPtr device = madeForDevices()) device->shutdown();
}

std::string LowcommBackend::flightRecord() {
  Engine* engine = running();
  TORCH_CHECK_WITH(DistBackendError, engine, "lowcomm: flight record of group ", groupName(),
                   ": expected a living group, got one that is gone");
  return engine->record().json();
}

InnerOpAccount LowcommBackend::accountOf(const std::string& name, uint64_t sequence, const std::string& detail,
                                  std::shared_ptr<OpProgress> progress) const {
  if (!progress) progress = engine_->record().add(name, static_cast<uint32_t>(sequence));
  if (progress) {
    progress->update([&](OpProgress::State& state) {
      state.description.emplace_back("inner backend", host_->getBackendName() + detail);
      state.start();
    });
  }
  return {"lowcomm: " + name + " failed on rank " + std::to_string(rank_) + " of " + std::to_string(size_) + " [op " +
              name + ", sequence " + std::to_string(sequence) + ", group " + groupName() + ", inner backend " +
              host_->getBackendName() + detail,
          std::chrono::steady_clock::now(), engine_, std::move(progress), static_cast<uint32_t>(sequence)};
}

// An op of a group that is over fails at once, with the first cause, also where the inner backend would have served it.
void LowcommBackend::expectLiving(const std::string& op) {
  Engine* engine = running();
  const std::string why = engine ? engine->endedWhy() : "";
  TORCH_CHECK_WITH(DistBackendError, why.empty(), "lowcomm: ", op, " on group ", groupName(),
                   " of a lost group; destroy it and make a new one. First cause: ", why);
  TORCH_CHECK_WITH(DistBackendError, engine && !stopped_, "lowcomm: ", op, ": group ", groupName(),
                   " was shut down: expected a living group");
}

// Whether lowcomm's own schedules take this tensor: dense memory of the host, or of a device whose own backend is
// missing or may not be used because the policy wants the op coded.
bool LowcommBackend::ownOp(const at::Tensor& tensor, const std::string& op) {
  if (tensor.layout() != at::kStrided || tensor.is_quantized()) return false;
  if (tensor.device().is_cpu()) return true;
  return tensor.device().is_cuda() && (settings().policy.codec(op) || !forDevices());
}

bool LowcommBackend::named(const std::string& op) const {
  std::lock_guard<std::mutex> lock(settings_mutex_);
  return settings_.policy.codec(op).has_value();
}

// Why no tensor of the type is coded here, whatever its size and shape; empty where one may be.
std::string LowcommBackend::exactBecauseOf(at::ScalarType type) {
  if (ExactScope::active()) return "inside lc.exact()";
  if (type == at::kFloat || type == at::kHalf || type == at::kBFloat16) return "";
  return std::string("dtype ") + c10::toString(type);
}

// The codec of one tensor of an op, where the policy names the op and nothing speaks against it.
// With axis=channel it follows the tensor's last dimension; ranks compare what comes of it before any element is sent.
// What goes exact is counted under the op's name in stats(), where it is not the policy's.
std::optional<CodecSpec> LowcommBackend::chooseCodec(const std::string& op, const at::Tensor& tensor,
                                                     uint64_t raw_bytes, const std::string& counted_as) {
  const at::ScalarType type = tensor.scalar_type();
  std::optional<CodecSpec> codec;
  uint64_t min_bytes;
  {
    std::lock_guard<std::mutex> lock(settings_mutex_);
    codec = settings_.policy.codec(op);
    min_bytes = settings_.min_bytes;
  }
  if (!codec) return std::nullopt;
  std::string because = exactBecauseOf(type);
  if (because.empty()) {
    because = raw_bytes < min_bytes ? "under min_bytes"
                                    : untaken(*codec, {tensor.sizes().data(), tensor.sizes().size()}).value_or("");
  }
  if (because.empty()) return tensor.dim() == 0 ? codec : codec->withChannels(static_cast<uint64_t>(tensor.size(-1)));
  noteExact(counted_as.empty() ? op : counted_as, because);
  return std::nullopt;
}

}  // namespace lowcomm
