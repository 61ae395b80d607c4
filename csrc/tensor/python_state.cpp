#include "tensor/python_state.h"

namespace lowcomm {
namespace {
BlockingGuard installed = nullptr;
}

void setBlockingGuard(BlockingGuard guard) {
  installed = guard;
}

void blocking(const std::function<void()>& wait) {
  if (installed) {
    installed(wait);
  } else {
    wait();
  }
}

}  // namespace lowcomm
