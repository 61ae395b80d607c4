#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <string>
#include <vector>

namespace lowcomm::test {

// Whether `text` holds every one of `parts`, naming the first it lacks.
inline testing::AssertionResult holds(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    if (text.find(part) == std::string::npos) return testing::AssertionFailure() << "no '" << part << "' in: " << text;
  }
  return testing::AssertionSuccess();
}

inline constexpr const char* kNothing = "nothing of that type";

// The text of the E that `f` throws. Errors of other types pass through.
template <class E = std::exception, class F>
std::string thrownBy(F&& f) {
  try {
    f();
  } catch (const E& error) {
    return error.what();
  }
  return kNothing;
}

}  // namespace lowcomm::test
