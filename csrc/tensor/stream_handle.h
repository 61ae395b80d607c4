#pragma once

#include <optional>

namespace lowcomm {

// A stream as its driver knows it: native_handle() in most torch versions, stream_handle() in others, none in a few.
template <class Stream>
std::optional<void*> handleOf(const Stream& stream) {
  if constexpr (requires { stream.native_handle(); }) {
    return stream.native_handle();
  } else if constexpr (requires { stream.stream_handle(); }) {
    return stream.stream_handle();
  } else {
    return std::nullopt;
  }
}

}  // namespace lowcomm
