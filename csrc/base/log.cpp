#include "base/log.h"

#include <cstdio>

namespace lowcomm {

void logLine(const std::string& text) {
  std::fputs(("lowcomm: " + text + "\n").c_str(), stderr);
}

}  // namespace lowcomm
