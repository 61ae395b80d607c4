#include "backend/store_rendezvous.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <stdexcept>
#include <vector>

#include "base/signals.h"

namespace lowcomm {

void StoreRendezvous::set(const std::string& key, const std::string& value) {
  store_->set(key, std::vector<uint8_t>(value.begin(), value.end()));
}

std::string StoreRendezvous::get(const std::string& key, std::chrono::milliseconds timeout) {
  std::exception_ptr late;
  bool raised = false;
  const auto ended = [&](std::chrono::milliseconds patience) {
    const auto begin = std::chrono::steady_clock::now();
    try {
      if (!raised) store_->wait({key}, std::max(patience, std::chrono::milliseconds(1)));
      return true;
    } catch (const std::exception&) {
      late = std::current_exception();
      if (std::chrono::steady_clock::now() - begin < patience) throw;  // no time-out
      return false;
    }
  };
  try {
    if (!waitWithSignals(timeout, ended, [&](const std::string&) { raised = true; })) std::rethrow_exception(late);
    const std::vector<uint8_t> value = store_->get(key);
    return {value.begin(), value.end()};
  } catch (const std::exception& error) {
    const std::string why(error.what());
    throw std::runtime_error(why.substr(0, why.find('\n')));  // torch appends a stack, line by line
  }
}

}  // namespace lowcomm
