#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "transport/tcp/socket.h"
#include "transport/tcp/tls.h"
#include "transport/tcp/wire.h"

struct ssl_st;  // OpenSSL's

namespace lowcomm::tcp {

// A pipe whose bytes travel as TLS records. Before the other end has shown that it has the key, it costs no more than
// the ClientHello's kMostClientHelloBytes, and then OpenSSL's buffers of a fixed size.
class SecurePipe final : public Pipe {
  // Where the record ends that the socket is in the middle of (RFC 8446, 5.1), for a record can be read as a whole
  // only.
  class RecordEnd {
   public:
    void see(std::span<const std::byte> encrypted);

    // Bytes that the socket has to bring before `plain` more bytes can be read, or some fewer.
    size_t missing(size_t plain) const;

   private:
    std::array<std::byte, 5> header_;
    size_t header_have_ = 0, bytes_ = 0, left_ = 0;  // of the record
  };

 public:
  ~SecurePipe() override;

  bool isOpen() const override { return open_; }
  std::optional<std::string> open() override;
  Moved read(std::span<std::byte> room, size_t& turn) override;
  Moved write(std::span<const iovec> parts) override;
  bool holds() const override { return sent_ < held_.size(); }
  std::optional<std::string> flush() override;
  void expect(size_t bytes) override;
  std::string cipher() const override;
  Wrong wrong() const override { return wrong_; }

  // The name that the dialling end gives itself; nothing before it has. It is true once the pipe is open.
  const std::optional<Identity>& identity() const { return identity_; }

 private:
  friend class Tls;
  friend struct SecureCallbacks;  // OpenSSL's, in secure.cpp

  SecurePipe(Fd fd, std::shared_ptr<Tls> tls, bool dials);
  std::optional<std::string> hearClientHello();
  std::optional<std::string> begin();
  std::string why(int error);

  const std::shared_ptr<Tls> tls_;
  const bool dials_;
  ssl_st* ssl_ = nullptr;
  bool open_ = false;
  Wrong wrong_ = Wrong::nothing;
  std::optional<Identity> identity_;
  uint64_t incarnation_ = 0;  // of an accepting end's process
  size_t handshake_left_;     // bytes that the handshake may still take from the socket
  uint64_t records_ = 0;      // since the last change of key

  // A stranger's, until a whole ClientHello is there; what OpenSSL reads first.
  std::vector<std::byte> first_;
  size_t first_read_ = 0;

  std::vector<std::byte> plain_;  // a record of several parts
  std::vector<std::byte> held_;   // encrypted, and not taken by the kernel from sent_ on
  size_t sent_ = 0;
  RecordEnd record_end_;
  size_t* turn_ = nullptr;                  // of the read under way
  std::optional<std::string> socket_over_;  // what the socket has failed with
};

}  // namespace lowcomm::tcp
