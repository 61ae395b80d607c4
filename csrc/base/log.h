#pragma once

#include <string>

namespace lowcomm {

// Writes a line to stderr, at once and whole, for what no caller waits to hear: the core has no other log. Thread-safe.
void logLine(const std::string& text);

}  // namespace lowcomm
