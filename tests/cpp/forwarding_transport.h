#pragma once

#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "transport/transport.h"

namespace lowcomm::test {

// Passes everything on to another transport, for tests that change one part of it.
class ForwardingTransport : public Transport {
 public:
  explicit ForwardingTransport(std::unique_ptr<Transport> inner) : inner_(std::move(inner)) {}
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::unique_ptr<Transfer> isend(Lane lane, int peer, uint32_t tag, std::span<const std::byte> data) override {
    return inner_->isend(lane, peer, tag, data);
  }
  void cancel(Lane lane) override { inner_->cancel(lane); }
  void acknowledge() override { inner_->acknowledge(); }
  std::optional<uint32_t> unclaimed(Lane lane, int peer, uint32_t first, uint32_t end) override {
    return inner_->unclaimed(lane, peer, first, end);
  }
  std::unique_ptr<Transfer> irecv(Lane lane, int peer, uint32_t tag, std::span<std::byte> data) override {
    return inner_->irecv(lane, peer, tag, data);
  }

 private:
  const std::unique_ptr<Transport> inner_;
};

}  // namespace lowcomm::test
