#include "transport/tcp/tls.h"

#include <utility>

#include "base/error.h"

#if LOWCOMM_OPENSSL
#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/kdf.h>
#include <openssl/params.h>
#include <openssl/ssl.h>
#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include <cstring>
#include <string_view>

namespace lowcomm::tcp {
namespace {

constexpr const char* kCiphers = "TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256";
constexpr std::string_view kKeyLabel = "lowcomm tls 1", kRelayLabel = "lowcomm relay 1";

[[noreturn]] void failed(const char* what) {
  std::array<char, 256> text{};
  ERR_error_string_n(ERR_peek_last_error(), text.data(), text.size());
  throw ValueError(std::string("LOWCOMM_SECRET: expected OpenSSL to give ") + what + ", got " + text.data());
}

}  // namespace

std::string tlsLibrary() {
  return OpenSSL_version(OPENSSL_VERSION);
}

Tls::Tls(Secret secret, uint64_t records_per_key) : secret_(std::move(secret)), records_per_key_(records_per_key) {
  // The system's configuration is for other programs, and at exit a thread may still be in OpenSSL.
  OPENSSL_init_ssl(OPENSSL_INIT_NO_LOAD_CONFIG | OPENSSL_INIT_NO_ATEXIT, nullptr);
  context_ = SSL_CTX_new(TLS_method());
  if (!context_) failed("a context");
  SSL_CTX_set_min_proto_version(context_, TLS1_3_VERSION);
  SSL_CTX_set_max_proto_version(context_, TLS1_3_VERSION);
  SSL_CTX_set_options(context_, SSL_OP_NO_TICKET);
  SSL_CTX_clear_options(context_, SSL_OP_ENABLE_MIDDLEBOX_COMPAT | SSL_OP_ALLOW_NO_DHE_KEX);
  SSL_CTX_set_num_tickets(context_, 0);
  SSL_CTX_set_session_cache_mode(context_, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_max_early_data(context_, 0);
  if (!SSL_CTX_set_ciphersuites(context_, kCiphers)) failed(kCiphers);
  if (!SSL_CTX_set1_groups_list(context_, "X25519:P-256")) failed("X25519");
}

Tls::~Tls() {
  SSL_CTX_free(context_);
}

Identity::Suite Tls::preferred() {
#if defined(__x86_64__)
  const bool fast = __builtin_cpu_supports("aes") && __builtin_cpu_supports("pclmul");
#elif defined(__aarch64__)
  const bool fast = getauxval(AT_HWCAP) & HWCAP_AES;
#else
  const bool fast = false;
#endif
  return fast ? Identity::Suite::aes_256_gcm : Identity::Suite::chacha20_poly1305;
}

std::array<std::byte, 32> Tls::key(const Identity& identity) const {
  std::array<std::byte, kKeyLabel.size() + kIdentityBytes> info;
  std::memcpy(info.data(), kKeyLabel.data(), kKeyLabel.size());
  tcp::write(identity, std::span(info).subspan<kKeyLabel.size()>());
  return derive(info);
}

RelayCode Tls::relayCode(const Hello& request) const {
  std::array<std::byte, kRelayLabel.size() + kHelloBytes> info;
  std::memcpy(info.data(), kRelayLabel.data(), kRelayLabel.size());
  tcp::write(request, std::span(info).subspan<kRelayLabel.size()>());
  return derive(info);
}

bool Tls::isRelayCode(const Hello& request, const RelayCode& code) const {
  const RelayCode expected = relayCode(request);
  return CRYPTO_memcmp(expected.data(), code.data(), code.size()) == 0;
}

// HKDF-SHA256 (RFC 5869) of the secret, without salt.
std::array<std::byte, 32> Tls::derive(std::span<const std::byte> info) const {
  std::array<std::byte, 32> key;
  EVP_KDF* hkdf = EVP_KDF_fetch(nullptr, "HKDF", nullptr);
  EVP_KDF_CTX* context = hkdf ? EVP_KDF_CTX_new(hkdf) : nullptr;
  char digest[] = "SHA256";
  const OSSL_PARAM parameters[] = {
      OSSL_PARAM_construct_utf8_string(OSSL_KDF_PARAM_DIGEST, digest, 0),
      OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_KEY, const_cast<char*>(secret_.text().data()),
                                        secret_.text().size()),
      OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_INFO, const_cast<std::byte*>(info.data()), info.size()),
      OSSL_PARAM_construct_end(),
  };
  const bool made =
      context && EVP_KDF_derive(context, reinterpret_cast<unsigned char*>(key.data()), key.size(), parameters) == 1;
  EVP_KDF_CTX_free(context);
  EVP_KDF_free(hkdf);
  if (!made) failed("HKDF-SHA256");
  return key;
}

}  // namespace lowcomm::tcp

#else

namespace lowcomm::tcp {

std::string tlsLibrary() {
  return "";
}

Tls::Tls(Secret secret, uint64_t records_per_key) : secret_(std::move(secret)), records_per_key_(records_per_key) {
  throw ValueError(secret_.from() + ": " + kWithoutTls);
}

Tls::~Tls() = default;

RelayCode Tls::relayCode(const Hello&) const {
  return {};
}

bool Tls::isRelayCode(const Hello&, const RelayCode&) const {
  return false;
}

Identity::Suite Tls::preferred() {
  return Identity::Suite::chacha20_poly1305;
}

}  // namespace lowcomm::tcp

#endif
