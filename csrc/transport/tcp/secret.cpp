#include "transport/tcp/secret.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <set>

#include "base/error.h"
#include "transport/tcp/socket.h"

namespace lowcomm::tcp {
namespace {

constexpr const char *kText = "LOWCOMM_SECRET", *kFile = "LOWCOMM_SECRET_FILE";
constexpr size_t kLeast = 43, kMost = 4096;  // characters; 32 bytes are 43 of base64
constexpr size_t kLeastDistinct = 8;         // 43 random characters of 16 have fewer once in 10^11 times

std::string trimmed(const std::string& text) {
  constexpr const char* kSpaces = " \t\r\n";
  const size_t first = text.find_first_not_of(kSpaces);
  return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(kSpaces) - first + 1);
}

std::string octal(mode_t mode) {
  std::array<char, 8> text;
  std::snprintf(text.data(), text.size(), "%04o", static_cast<unsigned>(mode & 07777));
  return text.data();
}

// A shell does so only where it reads the path without quotes.
std::string withHome(const std::string& path) {
  const char* home = std::getenv("HOME");
  return home && path.starts_with("~/") ? home + path.substr(1) : path;
}

// The file is asked after it was opened: a name may lead elsewhere a moment later.
std::string readFile(const std::string& path) {
  const std::string what = std::string(kFile) + ": '" + path + "': expected ";
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK));
  struct stat about{};
  if (!fd || ::fstat(fd.get(), &about) != 0) throw ValueError(what + "a file, got: " + std::strerror(errno));
  if (!S_ISREG(about.st_mode)) throw ValueError(what + "a file, got something else");
  if (about.st_uid != ::geteuid()) {
    throw ValueError(what + "a file of the user with number " + std::to_string(::geteuid()) + ", who runs this, got " +
                     std::to_string(about.st_uid) + "'s");
  }
  if (about.st_mode & 077)
    throw ValueError(what + "a file that its owner alone may read (mode 0600), got mode " + octal(about.st_mode));
  std::string text(kMost + 64, '\0');  // what is too long is found to be so
  size_t have = 0;
  while (have < text.size()) {
    const ssize_t count = ::read(fd.get(), text.data() + have, text.size() - have);
    if (count < 0) throw ValueError(what + "a file that can be read, got: " + std::strerror(errno));
    if (count == 0) break;
    have += count;
  }
  text.resize(have);
  return text;
}

}  // namespace

Secret::Secret(const std::string& text, const std::string& what) : text_(trimmed(text)), from_(what) {
  const std::string expected = what + ": expected 32 random bytes as text (`openssl rand -hex 32`), got ";
  if (text_.size() < kLeast || text_.size() > kMost) {
    throw ValueError(expected + std::to_string(text_.size()) + " characters, where " + std::to_string(kLeast) +
                     " ... " + std::to_string(kMost) + " may be");
  }
  if (!std::all_of(text_.begin(), text_.end(), [](char c) { return c > ' ' && c < 127; }))
    throw ValueError(expected + "a character that is not one of ASCII's, or a space");
  if (const size_t distinct = std::set<char>(text_.begin(), text_.end()).size(); distinct < kLeastDistinct)
    throw ValueError(expected + "no more than " + std::to_string(distinct) + " different characters");
}

std::optional<Secret> Secret::fromEnvironment() {
  const char *text = std::getenv(kText), *file = std::getenv(kFile);
  if (text && file) throw ValueError(std::string(kText) + ": expected it or " + kFile + ", got both");
  if (text) return Secret(text, kText);
  if (!file) return {};
  return Secret(readFile(withHome(trimmed(file))), kFile);
}

}  // namespace lowcomm::tcp
