#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "transport/tcp/secret.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/wire.h"

struct ssl_ctx_st;  // OpenSSL's, whose headers who includes this does not need

namespace lowcomm::tcp {

// The library that encrypts, with its version; empty in a build without, which takes no secret.
std::string tlsLibrary();

// The text about a secret in such a build.
inline constexpr const char* kWithoutTls =
    "expected a build with OpenSSL, which encrypts (Debian: libssl-dev where it is compiled), got one without";

class SecurePipe;

// TLS 1.3 (RFC 8446) by a key that both ends have from the secret, and by nothing else: no certificates, no tickets, no
// early data. The key is good for connections from one rank's process to another's, of one channel of one group:
//
//   psk = HKDF-SHA256(secret, no salt, "lowcomm tls 1" || identity), 32 bytes
//
// where the identity (wire.h) has all that, and the cipher suite. So what an end says is of no use to another group, to
// another rank, or to its sender, as for the keys of RFC 9258 (section 5.1; Appendix A on reflection). A fresh
// Diffie-Hellman exchange goes into every connection's keys (psk_dhe_ke, RFC 8446, section 4.2.9): recorded bytes stay
// secret when the secret is found out, and a ClientHello that is sent again leads nowhere.
//
// A pipe belongs to one thread at a time, and keeps what it was made by.
class Tls : public std::enable_shared_from_this<Tls> {
 public:
  // After `records_per_key` records each end changes its key (RFC 8446, sections 4.6.3 and 5.5: AES-GCM is good for
  // 2^24.5). ValueError where the build has no OpenSSL.
  explicit Tls(Secret secret, uint64_t records_per_key = uint64_t{1} << 22);
  ~Tls();

  const Secret& secret() const { return secret_; }

  // The key of a connection.
  std::array<std::byte, 32> key(const Identity& identity) const;

  // The code of a request to a relay, which shows that its sender has the secret (HKDF-SHA256 as a MAC):
  //
  //   code = HKDF-SHA256(secret, no salt, "lowcomm relay 1" || hello), 32 bytes
  //
  // isRelayCode() takes the same time wherever a wrong one differs.
  RelayCode relayCode(const Hello& request) const;
  bool isRelayCode(const Hello& request, const RelayCode& code) const;

  // The suite that an end here dials with: AES-256-GCM where the processor has instructions for it.
  static Identity::Suite preferred();

  // Pipes that are yet to be opened (secure.h).
  std::unique_ptr<SecurePipe> dial(Fd fd, const Identity& identity);

  // `incarnation`: of this process; who dials another's is turned away.
  std::unique_ptr<SecurePipe> accept(Fd fd, uint64_t incarnation);

  // OpenSSL's own, for what follows from all this.
  ssl_ctx_st* context() const { return context_; }
  uint64_t recordsPerKey() const { return records_per_key_; }

 private:
  std::array<std::byte, 32> derive(std::span<const std::byte> info) const;

  const Secret secret_;
  const uint64_t records_per_key_;
  ssl_ctx_st* context_ = nullptr;
};

}  // namespace lowcomm::tcp
