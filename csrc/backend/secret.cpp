#include "backend/secret.h"

#include "base/error.h"
#include "transport/tcp/secret.h"
#include "transport/tcp/tls.h"

namespace lowcomm {

void applySecret(Settings& settings) {
  const auto secret = tcp::Secret::fromEnvironment();
  if (!secret) return;
  if (tcp::tlsLibrary().empty()) throw ValueError(secret->from() + ": " + tcp::kWithoutTls);
  if (settings.transport != "tcp") {
    throw ValueError(secret->from() + ": expected transport=\"tcp\" (LOWCOMM_TRANSPORT=tcp), as only its connections " +
                     "are encrypted, got '" + settings.transport + "'");
  }
  if (settings.nccl == true)
    throw ValueError("nccl: expected None or False with " + secret->from() + ", as NCCL encrypts nothing, got True");
  settings.nccl = false;
  settings.secret = true;
}

}  // namespace lowcomm
