#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>
#include <utility>

#include "transport/transport.h"

namespace lowcomm {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// torch's store as a Rendezvous.
class StoreRendezvous final : public Rendezvous {
 public:
  explicit StoreRendezvous(StorePtr store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, std::chrono::milliseconds timeout) override;

  const StorePtr& store() const { return store_; }

 private:
  const StorePtr store_;
};

}  // namespace lowcomm
