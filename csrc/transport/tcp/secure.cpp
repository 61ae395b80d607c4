#include "transport/tcp/secure.h"

#include "base/error.h"

#if LOWCOMM_OPENSSL
#include <openssl/bio.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/sslerr.h>

#include <algorithm>
#include <cstring>
#include <new>

namespace lowcomm::tcp {
namespace {

constexpr size_t kRecordBytes = SSL3_RT_MAX_PLAIN_LENGTH;
constexpr size_t kBatchBytes = 4 * kRecordBytes;        // encrypted before the kernel is offered them: a piece
constexpr size_t kReadBytes = 4 * (kRecordBytes + 64);  // asked of the kernel at once
constexpr size_t kMostHandshakeBytes = 4096;            // that an end says before its first data; 400 are usual
const char* nameOf(Identity::Suite suite) {
  return suite == Identity::Suite::aes_256_gcm ? "TLS_AES_256_GCM_SHA384" : "TLS_CHACHA20_POLY1305_SHA256";
}

// RFC 8446, appendix B.4.
const unsigned char* numberOf(Identity::Suite suite) {
  static constexpr unsigned char kAes[] = {0x13, 0x02}, kChaCha[] = {0x13, 0x03};
  return suite == Identity::Suite::aes_256_gcm ? kAes : kChaCha;
}

// The key as OpenSSL takes it: a session without a past.
SSL_SESSION* sessionOf(SSL* ssl, std::array<std::byte, 32> key, Identity::Suite suite) {
  SSL_SESSION* session = SSL_SESSION_new();
  const SSL_CIPHER* cipher = SSL_CIPHER_find(ssl, numberOf(suite));
  const bool made = session && cipher &&
                    SSL_SESSION_set1_master_key(session, reinterpret_cast<const unsigned char*>(key.data()), 32) &&
                    SSL_SESSION_set_cipher(session, cipher) &&
                    SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION);
  OPENSSL_cleanse(key.data(), key.size());
  if (made) return session;
  SSL_SESSION_free(session);
  return nullptr;
}

}  // namespace

// Functions that OpenSSL calls. No exception may leave these.
struct SecureCallbacks {
  static SecurePipe& pipeOf(SSL* ssl) { return *static_cast<SecurePipe*>(SSL_get_app_data(ssl)); }

  // The dialling end's key.
  static int use(SSL* ssl, const EVP_MD*, const unsigned char** identity, size_t* bytes, SSL_SESSION** session) {
    SecurePipe& pipe = pipeOf(ssl);
    *identity = reinterpret_cast<const unsigned char*>(pipe.first_.data());
    *bytes = pipe.first_.size();
    try {
      *session = sessionOf(ssl, pipe.tls_->key(*pipe.identity_), pipe.identity_->suite);
    } catch (...) {
      *session = nullptr;
    }
    return *session != nullptr;
  }

  // The accepting side's lookup. If it finds no session the handshake fails for want of a certificate.
  static int find(SSL* ssl, const unsigned char* bytes, size_t size, SSL_SESSION** session) {
    SecurePipe& pipe = pipeOf(ssl);
    *session = nullptr;
    try {
      const Identity identity = parseIdentity(std::as_bytes(std::span(bytes, size)));
      // 0: of a store's client, which knows none.
      if (identity.peer_incarnation != pipe.incarnation_ && identity.peer_incarnation != 0) return 1;
      *session = sessionOf(ssl, pipe.tls_->key(identity), identity.suite);
      pipe.identity_ = identity;
    } catch (...) {
    }
    return 1;
  }

  // ---- the socket, as OpenSSL reads and writes it ----

  static int write(BIO* bio, const char* data, size_t size, size_t* written) {
    SecurePipe& pipe = *static_cast<SecurePipe*>(BIO_get_data(bio));
    const auto* from = reinterpret_cast<const std::byte*>(data);
    try {
      pipe.held_.insert(pipe.held_.end(), from, from + size);
    } catch (const std::bad_alloc&) {
      return 0;
    }
    *written = size;
    return 1;
  }

  static int read(BIO* bio, char* data, size_t size, size_t* got) {
    SecurePipe& pipe = *static_cast<SecurePipe*>(BIO_get_data(bio));
    BIO_clear_retry_flags(bio);
    *got = 0;
    if (!pipe.dials_ && pipe.first_read_ < pipe.first_.size()) {
      *got = std::min(size, pipe.first_.size() - pipe.first_read_);
      std::memcpy(data, pipe.first_.data() + pipe.first_read_, *got);
      pipe.first_read_ += *got;
      pipe.record_end_.see({reinterpret_cast<const std::byte*>(data), *got});
      return 1;
    }
    size_t none = 0;
    const Moved moved = pipe.Pipe::read({reinterpret_cast<std::byte*>(data), size}, pipe.turn_ ? *pipe.turn_ : none);
    *got = moved.bytes;
    pipe.record_end_.see({reinterpret_cast<const std::byte*>(data), moved.bytes});
    pipe.socket_over_ = moved.over;
    if (moved.bytes > 0) return 1;
    if (!moved.over) BIO_set_retry_read(bio);
    return 0;
  }

  static long control(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH ? 1 : 0; }

  static const BIO_METHOD* method() {
    static BIO_METHOD* const made = [] {
      BIO_METHOD* method = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "lowcomm");
      if (!method) return method;
      BIO_meth_set_write_ex(method, write);
      BIO_meth_set_read_ex(method, read);
      BIO_meth_set_ctrl(method, control);
      return method;
    }();
    return made;
  }
};

std::unique_ptr<SecurePipe> Tls::dial(Fd fd, const Identity& identity) {
  std::unique_ptr<SecurePipe> pipe(new SecurePipe(std::move(fd), shared_from_this(), /*dials=*/true));
  pipe->identity_ = identity;
  pipe->first_.resize(kIdentityBytes);
  tcp::write(identity, std::span(pipe->first_).first<kIdentityBytes>());
  return pipe;
}

std::unique_ptr<SecurePipe> Tls::accept(Fd fd, uint64_t incarnation) {
  std::unique_ptr<SecurePipe> pipe(new SecurePipe(std::move(fd), shared_from_this(), /*dials=*/false));
  pipe->incarnation_ = incarnation;
  return pipe;
}

SecurePipe::SecurePipe(Fd fd, std::shared_ptr<Tls> tls, bool dials)
    : Pipe(std::move(fd)), tls_(std::move(tls)), dials_(dials), handshake_left_(kMostHandshakeBytes) {}

SecurePipe::~SecurePipe() {
  SSL_free(ssl_);
}

std::optional<std::string> SecurePipe::begin() {
  SSL* ssl = SSL_new(tls_->context());
  BIO* bio = ssl && SecureCallbacks::method() ? BIO_new(SecureCallbacks::method()) : nullptr;
  if (!bio) {
    SSL_free(ssl);
    return "OpenSSL has no memory for a connection";
  }
  BIO_set_data(bio, this);
  BIO_set_init(bio, 1);
  SSL_set_bio(ssl, bio, bio);
  SSL_set_app_data(ssl, this);
  SSL_set_psk_use_session_callback(ssl, SecureCallbacks::use);
  SSL_set_psk_find_session_callback(ssl, SecureCallbacks::find);
  dials_ ? SSL_set_connect_state(ssl) : SSL_set_accept_state(ssl);
  if (dials_) {
    SSL_set_ciphersuites(ssl, nameOf(identity_->suite));
    // Nobody is trusted for a certificate: an end that shows one in place of the key is turned away.
    SSL_set_verify(ssl, SSL_VERIFY_PEER, nullptr);
  }
  ssl_ = ssl;
  return {};
}

// OpenSSL would make room for a message as long as a stranger says that his is.
std::optional<std::string> SecurePipe::hearClientHello() {
  constexpr size_t kBegin = 9;  // tells how long it is
  while (true) {
    size_t wanted = kBegin;
    try {
      wanted = clientHelloBytes(first_).value_or(kBegin);
    } catch (const WireError& error) {
      return error.what();
    }
    const size_t have = first_.size();
    if (have >= kBegin && have == wanted) return begin();
    first_.resize(std::max(wanted, kBegin));
    size_t turn = first_.size() - have;
    const Moved got = Pipe::read(std::span(first_).subspan(have), turn);
    first_.resize(have + got.bytes);
    if (got.bytes == 0) return got.over;
  }
}

std::optional<std::string> SecurePipe::open() {
  if (!ssl_) {
    if (auto over = dials_ ? begin() : hearClientHello()) return over;
    if (!ssl_) return {};
  }
  turn_ = &handshake_left_;
  ERR_clear_error();
  const int done = SSL_do_handshake(ssl_);
  turn_ = nullptr;
  std::optional<std::string> over;
  if (const int error = SSL_get_error(ssl_, done); done != 1 && error != SSL_ERROR_WANT_READ) over = why(error);
  if (done != 1 && handshake_left_ == 0)
    over = "expected a handshake of at most " + std::to_string(kMostHandshakeBytes) + " bytes, got more";
  auto flushed = flush();  // the end's flight, or an alert
  if (over) return over;
  if (done != 1 || flushed) return flushed;
  if (!SSL_session_reused(ssl_)) return "expected an end with the secret, got one without";  // cannot be: see verify
  open_ = true;
  first_ = {};
  // Larger reads, of as many records as there are, now that it is known whom they are from.
  SSL_free_buffers(ssl_);
  SSL_set_default_read_buffer_len(ssl_, kReadBytes);
  SSL_set_read_ahead(ssl_, 1);
  plain_.resize(kRecordBytes);
  held_.reserve(kBatchBytes + kRecordBytes);
  return {};
}

Moved SecurePipe::read(std::span<std::byte> room, size_t& turn) {
  size_t bytes = 0;
  turn_ = &turn;
  ERR_clear_error();
  const int done = SSL_read_ex(ssl_, room.data(), room.size(), &bytes);
  turn_ = nullptr;
  if (done == 1) return {bytes};
  const int error = SSL_get_error(ssl_, done);
  if (error == SSL_ERROR_WANT_READ) return {};
  return {0, why(error)};
}

void SecurePipe::RecordEnd::see(std::span<const std::byte> encrypted) {
  while (!encrypted.empty()) {
    if (left_ > 0) {
      const size_t here = std::min(left_, encrypted.size());
      left_ -= here;
      encrypted = encrypted.subspan(here);
      continue;
    }
    header_[header_have_++] = encrypted[0];
    encrypted = encrypted.subspan(1);
    if (header_have_ < header_.size()) continue;
    header_have_ = 0;
    left_ = bytes_ = static_cast<size_t>(header_[3]) << 8 | static_cast<size_t>(header_[4]);
  }
}

size_t SecurePipe::RecordEnd::missing(size_t plain) const {
  constexpr size_t kInside = 17;  // the type of what is encrypted, and the tag
  const size_t header = header_.size() - header_have_;
  if (left_ == 0) return header + plain + kInside;
  const size_t has = bytes_ - std::min(bytes_, kInside);
  return left_ + (plain > has ? header + plain - has + kInside : 0);
}

void SecurePipe::expect(size_t bytes) {
  Pipe::expect(record_end_.missing(bytes));
}

Moved SecurePipe::write(std::span<const iovec> parts) {
  if (auto over = flush()) return {0, over};
  if (holds()) return {};
  size_t taken = 0, skipped = 0;  // of the first of `parts`
  while (!parts.empty() && held_.size() < kBatchBytes) {
    // A record of one part where that fills it, else of what fits of several.
    std::span<const std::byte> record;
    size_t bytes = 0;
    while (!parts.empty() && bytes < kRecordBytes) {
      const auto* from = static_cast<const std::byte*>(parts[0].iov_base) + skipped;
      const size_t here = std::min(parts[0].iov_len - skipped, kRecordBytes - bytes);
      if (here == kRecordBytes) {
        record = {from, here};
      } else {
        std::memcpy(plain_.data() + bytes, from, here);
        record = {plain_.data(), bytes + here};
      }
      bytes += here;
      skipped += here;
      if (skipped == parts[0].iov_len) parts = parts.subspan(1), skipped = 0;
    }
    ERR_clear_error();
    if (records_++ == tls_->recordsPerKey()) {
      records_ = 1;
      SSL_key_update(ssl_, SSL_KEY_UPDATE_NOT_REQUESTED);
    }
    size_t written = 0;
    const int done = SSL_write_ex(ssl_, record.data(), record.size(), &written);
    if (done != 1) return {0, why(SSL_get_error(ssl_, done))};
    taken += written;
  }
  if (auto over = flush()) return {0, over};
  return {taken};
}

std::optional<std::string> SecurePipe::flush() {
  while (holds()) {
    const iovec rest{held_.data() + sent_, held_.size() - sent_};
    const Moved moved = Pipe::write({&rest, 1});
    if (moved.bytes == 0) return moved.over;
    sent_ += moved.bytes;
  }
  held_.clear();
  sent_ = 0;
  return {};
}

std::string SecurePipe::cipher() const {
  return open_ ? SSL_get_cipher_name(ssl_) : "";
}

// Why OpenSSL goes no further.
std::string SecurePipe::why(int error) {
  const std::string of_tls = ERR_reason_error_string(ERR_peek_error()) ? ERR_reason_error_string(ERR_peek_error()) : "";
  const int reason = ERR_GET_REASON(ERR_peek_error());
  ERR_clear_error();
  if (!open_ && error == SSL_ERROR_SSL) {
    // The dialling end hears of it by an alert (RFC 8446, section 6.2).
    switch (reason) {
      case SSL_R_BINDER_DOES_NOT_VERIFY:
      case SSL_AD_REASON_OFFSET + SSL_AD_ILLEGAL_PARAMETER:
      case SSL_AD_REASON_OFFSET + SSL_AD_DECRYPT_ERROR:
        wrong_ = Wrong::secret;
        return "it has another secret";
      case SSL_AD_REASON_OFFSET + SSL_AD_HANDSHAKE_FAILURE:
      case SSL_AD_REASON_OFFSET + SSL_AD_UNKNOWN_PSK_IDENTITY:
        wrong_ = Wrong::process;
        return "another process, which was started later or is of another job";
    }
  }
  if (socket_over_) {
    if (open_ || !dials_ || handshake_left_ < kMostHandshakeBytes) return *socket_over_;
    return *socket_over_ + " before TLS began, as one without a secret does";
  }
  if (error == SSL_ERROR_ZERO_RETURN) return "the peer has closed the connection";
  return "TLS: " + (of_tls.empty() ? "error " + std::to_string(error) : of_tls);
}

}  // namespace lowcomm::tcp

#else

namespace lowcomm::tcp {

// No Tls is ever made, and so no pipe.
std::unique_ptr<SecurePipe> Tls::dial(Fd, const Identity&) {
  return nullptr;
}
std::unique_ptr<SecurePipe> Tls::accept(Fd, uint64_t) {
  return nullptr;
}
SecurePipe::~SecurePipe() = default;
std::optional<std::string> SecurePipe::open() {
  return "no OpenSSL";
}
Moved SecurePipe::read(std::span<std::byte>, size_t&) {
  return {0, "no OpenSSL"};
}
Moved SecurePipe::write(std::span<const iovec>) {
  return {0, "no OpenSSL"};
}
std::optional<std::string> SecurePipe::flush() {
  return "no OpenSSL";
}
void SecurePipe::expect(size_t) {}
std::string SecurePipe::cipher() const {
  return {};
}

}  // namespace lowcomm::tcp

#endif
