#include "backend/exact_scope.h"

#include <vector>

namespace lowcomm {
namespace {

thread_local std::vector<std::shared_ptr<std::atomic<bool>>> scopes;

}  // namespace

void ExactScope::enter() {
  open_ = std::make_shared<std::atomic<bool>>(true);
  scopes.push_back(open_);
}

void ExactScope::leave() {
  if (open_) *open_ = false;
  open_.reset();
  std::erase_if(scopes, [](const auto& open) { return !*open; });
}

bool ExactScope::active() {
  std::erase_if(scopes, [](const auto& open) { return !*open; });  // those that were left on another thread
  return !scopes.empty();
}

}  // namespace lowcomm
