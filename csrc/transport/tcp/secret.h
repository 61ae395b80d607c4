#pragma once

#include <optional>
#include <string>

namespace lowcomm::tcp {

// The text that all ranks of a job share and no other process has: at least 32 random bytes, as base64 or hexadecimal
// digits (RFC 9257, section 4.2: a guessed secret protects nothing). `openssl rand -hex 32` makes one.
class Secret {
 public:
  // ValueError naming `what`, but not the text, where it is too short for 32 random bytes, longer than 4096
  // characters, of one character again and again, or has spaces or others than ASCII's in it. Spaces and line ends
  // around it do not count.
  Secret(const std::string& text, const std::string& what);

  // Reads LOWCOMM_SECRET, or the file that LOWCOMM_SECRET_FILE names, which only its owner may read, and whose owner
  // must run this process. Empty if neither is set. ValueError naming the variable.
  static std::optional<Secret> fromEnvironment();

  const std::string& text() const { return text_; }

  // The variable that it is from.
  const std::string& from() const { return from_; }

  bool operator==(const Secret& other) const { return text_ == other.text_; }

 private:
  std::string text_, from_;
};

}  // namespace lowcomm::tcp
