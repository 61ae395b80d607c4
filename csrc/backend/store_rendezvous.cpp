#include "backend/store_rendezvous.h"

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <vector>

namespace lowcomm {
namespace {

// Of an error's text the first line: torch appends a stack, line by line.
template <class F>
auto inOneLine(F&& read) {
  try {
    return read();
  } catch (const std::exception& error) {
    const std::string why(error.what());
    throw std::runtime_error(why.substr(0, why.find('\n')));
  }
}

}  // namespace

void StoreRendezvous::set(const std::string& key, const std::string& value) {
  store_->set(key, std::vector<uint8_t>(value.begin(), value.end()));
}

void StoreRendezvous::wait(const std::string& key, std::chrono::milliseconds timeout) {
  inOneLine([&] { store_->wait({key}, timeout); });
}

std::string StoreRendezvous::get(const std::string& key) {
  return inOneLine([&] {
    const std::vector<uint8_t> value = store_->get(key);
    return std::string(value.begin(), value.end());
  });
}

}  // namespace lowcomm
