#include "backend/store.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <fcntl.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/process.h"
#include "tensor/errors.h"
#include "tensor/python_state.h"

namespace lowcomm {
namespace {

using std::chrono::milliseconds;

constexpr const char* kLoopback = "127.0.0.1";

c10d::TCPStoreOptions optionsFor(uint16_t port, milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = port;
  options.waitWorkers = false;
  options.timeout = timeout;
  return options;
}

void expectFits(const std::vector<uint8_t>& value) {
  TORCH_CHECK_VALUE(value.size() <= PortStore::kMostBytes, "lowcomm: store: expected a value of at most ",
                    PortStore::kMostBytes, " bytes, got ", value.size());
}

}  // namespace

PortStore::PortStore(const c10d::TCPStoreOptions& options, std::shared_ptr<tcp::TunnelExit> exit,
                     std::shared_ptr<tcp::TunnelEntry> entry, c10::intrusive_ptr<c10d::Store> server)
    : TCPStore(kLoopback, options), exit_(std::move(exit)), entry_(std::move(entry)), server_(std::move(server)) {}

c10::intrusive_ptr<PortStore> PortStore::serve(milliseconds timeout, size_t ranks) {
  return translated([&] {
    auto [listener, port] = tcp::listenOnLoopback();
    std::shared_ptr<tcp::TunnelExit> exit(new tcp::TunnelExit(tcp::Endpoint::shared(), port, ranks), UnlessForked());
    c10d::TCPStoreOptions options = optionsFor(port, timeout);
    options.isServer = true;
    options.masterListenFd = ::fcntl(listener.get(), F_DUPFD_CLOEXEC, 0);  // torch closes it
    TORCH_CHECK_VALUE(*options.masterListenFd >= 0, "lowcomm: store: expected a descriptor, got: ", strerror(errno));
    return c10::make_intrusive<PortStore>(options, std::move(exit), nullptr, nullptr);
  });
}

c10::intrusive_ptr<PortStore> PortStore::dial(const std::string& address, milliseconds timeout) {
  return translated([&] {
    std::shared_ptr<tcp::TunnelEntry> entry;
    try {
      blocking([&] { entry.reset(new tcp::TunnelEntry(tcp::Endpoint::shared(), address, timeout), UnlessForked()); });
    } catch (const TransportError& error) {
      TORCH_CHECK_WITH(DistNetworkError, false, "lowcomm: ", error.what());
    }
    const c10d::TCPStoreOptions options = optionsFor(entry->port(), timeout);
    return c10::make_intrusive<PortStore>(options, nullptr, std::move(entry), nullptr);
  });
}

c10::intrusive_ptr<c10d::Store> PortStore::clone() {
  if (entry_) return dial(entry_->address(), timeout_);
  auto server = server_ ? server_ : c10::intrusive_ptr<c10d::Store>::reclaim_copy(this);
  return c10::make_intrusive<PortStore>(optionsFor(getPort(), timeout_), nullptr, nullptr, std::move(server));
}

// The answer to a request comes after those before it were served. None is no error: who waits for the change may have
// ended the server since.
void PortStore::reachServer() {
  if (!entry_) return;
  try {
    TCPStore::getNumKeys();
  } catch (const c10::DistNetworkError& error) {
    LOG(WARNING) << "lowcomm: store: a change was sent, and no answer says that it has come: " << error.msg();
  }
}

void PortStore::set(const std::string& key, const std::vector<uint8_t>& value) {
  expectFits(value);
  TCPStore::set(key, value);
  reachServer();
}

std::vector<uint8_t> PortStore::compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                           const std::vector<uint8_t>& desired) {
  expectFits(expected);
  expectFits(desired);
  return TCPStore::compareSet(key, expected, desired);
}

void PortStore::append(const std::string& key, const std::vector<uint8_t>& value) {
  expectFits(value);
  TCPStore::append(key, value);
  reachServer();
}

void PortStore::multiSet(const std::vector<std::string>& keys, const std::vector<std::vector<uint8_t>>& values) {
  for (const std::vector<uint8_t>& value : values)
    expectFits(value);
  TCPStore::multiSet(keys, values);
  reachServer();
}

void PortStore::queuePush(const std::string& key, const std::vector<uint8_t>& value) {
  expectFits(value);
  TCPStore::queuePush(key, value);
  reachServer();
}

}  // namespace lowcomm
