#pragma once

#include <cmath>
#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>

namespace lowcomm {

// The torch-free core's own exceptions. tensor/errors.h maps them: ValueError -> ValueError, TypeError -> TypeError,
// PeerError and WireError -> DistBackendError. Every message states what was expected and what was found.

// A caller's mistake, found before anything was sent: bad option, bad shape, bad range.
struct ValueError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// A caller's mistake of type: an element type that the operation does not take.
struct TypeError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// A NaN, an infinity or a magnitude of `limit` and more met by a codec under nonfinite=error; `limit` is a power of
// two, infinity where every finite element is taken. `position` is the element's index in the tensor that was cut into
// runs; a collective counts it in the whole message, also where that has several segments. `of` ends the sentence: "of
// the slice for rank 2".
struct NonFiniteError : ValueError {
  NonFiniteError(const std::string& codec, float value, uint64_t position, float limit, const std::string& of = "")
      : ValueError(codec + ": expected finite elements" +
                   (std::isinf(limit) ? "" : " below 2^" + std::to_string(std::ilogb(limit)) + " in magnitude") +
                   " (nonfinite=error), got " + std::to_string(value) + " at element " + std::to_string(position) +
                   (of.empty() ? "" : " ") + of),
        codec(codec),
        value(value),
        position(position),
        limit(limit) {}
  std::string codec;
  float value;
  uint64_t position;
  float limit;
};

// Bytes from a peer that are not what the format or the op allows: field, expected, got.
struct WireError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The operating system refused to open, read or write a file; `code` is its errno. Python gets an OSError with code,
// text and path.
struct FileError : std::runtime_error {
  FileError(const std::string& what, const std::string& path, int code)
      : std::runtime_error(what), path(path), code(code) {}
  std::string path;
  int code;
};

// A peer or the network failed: op, sequence number, ranks, elapsed time and bytes done are in the message.
struct PeerError : std::runtime_error {
  explicit PeerError(const std::string& what, int peer = -1) : std::runtime_error(what), peer(peer) {}
  int peer;  // group rank at the other end, -1 when there is no single one
};

// The text of an error.
inline std::string whatOf(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  }
}

// The beginning of a UTF-8 text: at most so many bytes, and no character in part.
inline std::string beginningOf(const std::string& text, size_t bytes) {
  if (text.size() <= bytes) return text;
  while (bytes > 0 && (static_cast<unsigned char>(text[bytes]) & 0xc0) == 0x80)
    --bytes;
  return text.substr(0, bytes);
}

}  // namespace lowcomm
