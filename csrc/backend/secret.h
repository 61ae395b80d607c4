#pragma once

#include "backend/options.h"

namespace lowcomm {

// Where the environment has a secret (transport/tcp/secret.h), what a group may have: the one place that says so. It
// turns NCCL off, whose connections nothing encrypts, and notes that there is one. ValueError naming the variable or
// the option: a secret that is none, a build without OpenSSL, another transport than tcp, or NCCL where it is asked
// for.
void applySecret(Settings& settings);

}  // namespace lowcomm
