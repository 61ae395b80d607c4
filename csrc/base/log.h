#pragma once

#include <cstdio>
#include <string>

namespace lowcomm {

// Writes a line to stderr, at once and whole, for what no caller waits to hear: the core has no other log. Thread-safe.
inline void logLine(const std::string& text) {
  std::fputs(("lowcomm: " + text + "\n").c_str(), stderr);
}

}  // namespace lowcomm
