#include "transport/tcp/secret.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "base/error.h"
#include "transport/tcp_ranks.h"

// The text itself, where it is from, and ranks that do not have the same.

namespace lowcomm {
namespace {

using tcp::Secret;

const std::string kText = "b0pBTzHWtmPlKzjrLn7SdrZxdFKFEE9lbYgOxDY3xPI";

// The error names the variable and what is wrong, and never the text.
void expectRefused(const std::function<void()>& f, const std::string& variable, const std::string& what) {
  try {
    f();
    ADD_FAILURE() << "expected a ValueError with '" << what << "'";
  } catch (const ValueError& error) {
    const std::string text = error.what();
    EXPECT_EQ(text.rfind(variable, 0), 0u) << text;
    EXPECT_NE(text.find(what), std::string::npos) << text;
    EXPECT_EQ(text.find(kText.substr(1, 30)), std::string::npos) << text;
  }
}

class TcpSecret : public testing::Test {
 protected:
  ~TcpSecret() override {
    ::unsetenv("LOWCOMM_SECRET");
    ::unsetenv("LOWCOMM_SECRET_FILE");
    std::filesystem::remove(path_);
  }
  void file(const std::string& text, mode_t mode) {
    std::ofstream(path_) << text;
    ::chmod(path_.c_str(), mode);
    ::setenv("LOWCOMM_SECRET_FILE", path_.c_str(), 1);
  }
  const std::string path_ = testing::TempDir() + "lowcomm_secret_" + std::to_string(::getpid());
};

TEST_F(TcpSecret, IsTextOf32RandomBytes) {
  EXPECT_EQ(Secret(" " + kText + "\r\n", "x").text(), kText);
  EXPECT_EQ(Secret(kText, "x"), Secret(kText + "\n", "y"));
  const std::string expected = "expected 32 random bytes as text";
  expectRefused([] { Secret("", "x"); }, "x", "got 0 characters");
  expectRefused([] { Secret(kText.substr(1), "x"); }, "x", "got 42 characters, where 43 ... 4096 may be");
  expectRefused([] { Secret(std::string(5000, 'a'), "x"); }, "x", "got 5000 characters");
  expectRefused([] { Secret(std::string(64, '0'), "x"); }, "x", "no more than 1 different");
  expectRefused([] { Secret(kText + " " + kText, "x"); }, "x", "or a space");
  expectRefused([] { Secret(kText + "\xc3\xa4", "x"); }, "x", "not one of ASCII's");
}

TEST_F(TcpSecret, IsOfTheEnvironment) {
  EXPECT_FALSE(Secret::fromEnvironment());
  ::setenv("LOWCOMM_SECRET", kText.c_str(), 1);
  EXPECT_EQ(Secret::fromEnvironment()->text(), kText);
  EXPECT_EQ(Secret::fromEnvironment()->from(), "LOWCOMM_SECRET");
  ::setenv("LOWCOMM_SECRET", "", 1);
  expectRefused([] { Secret::fromEnvironment(); }, "LOWCOMM_SECRET", "got 0 characters");
  ::setenv("LOWCOMM_SECRET_FILE", "/nowhere", 1);
  expectRefused([] { Secret::fromEnvironment(); }, "LOWCOMM_SECRET", "got both");
  ::unsetenv("LOWCOMM_SECRET");
  expectRefused([] { Secret::fromEnvironment(); }, "LOWCOMM_SECRET_FILE", "No such file");
}

TEST_F(TcpSecret, IsOfAFileThatNobodyElseReads) {
  for (const mode_t mode : {0600, 0400}) {
    file(kText + "\n", mode);
    EXPECT_EQ(Secret::fromEnvironment()->text(), kText);
    std::filesystem::remove(path_);
  }
  for (const mode_t mode : {0604, 0640, 0620, 0601}) {
    file(kText, mode);
    expectRefused([] { Secret::fromEnvironment(); }, "LOWCOMM_SECRET_FILE", "mode 0600), got mode 06");
  }
  const char* const home = std::getenv("HOME");
  ::setenv("LOWCOMM_SECRET_FILE", "~/none", 1);
  if (home) expectRefused([] { Secret::fromEnvironment(); }, "LOWCOMM_SECRET_FILE", home + std::string("/none"));
  file(std::string(10'000, 'a'), 0600);
  expectRefused([] { Secret::fromEnvironment(); }, "LOWCOMM_SECRET_FILE", "characters, where");
  ::setenv("LOWCOMM_SECRET_FILE", "/dev/null", 1);
  expectRefused([] { Secret::fromEnvironment(); }, "LOWCOMM_SECRET_FILE", "got something else");
  if (::geteuid() == 0) {
    file(kText, 0600);
    ASSERT_EQ(::chown(path_.c_str(), 12345, 12345), 0);
    expectRefused([] { Secret::fromEnvironment(); }, "LOWCOMM_SECRET_FILE", "got 12345's");
  }
}

TEST_F(TcpSecret, OneThatIsMissingIsNamedOnEveryRank) {
  if (tcp::tlsLibrary().empty()) GTEST_SKIP() << "this build has no OpenSSL";
  const std::vector<std::string> errors =
      UnlikeRanks({onLoopback(aSecret()), onLoopback(), onLoopback(aSecret())}, 2).errors;
  EXPECT_NE(errors[0].find("rank 1: expected LOWCOMM_SECRET or LOWCOMM_SECRET_FILE on all ranks or on none, "
                           "got none there and one here"),
            std::string::npos)
      << errors[0];
  EXPECT_NE(errors[1].find("got one there and none here"), std::string::npos) << errors[1];
  EXPECT_NE(errors[2].find("rank 1: expected LOWCOMM_SECRET"), std::string::npos) << errors[2];
}

}  // namespace
}  // namespace lowcomm
