#include "wire/hello.h"

#include <gtest/gtest.h>

#include <random>

#include "codec/error.h"

namespace lowcomm {
namespace {

std::string refusal(const Hello& mine, const Hello& theirs) {
  try {
    expectSameHello(mine, 0, theirs, 1);
  } catch (const WireError& error) {
    return error.what();
  }
  return "";
}

TEST(Hello, RoundTrip) {
  const Hello hello{{{"wire_version", "1"}, {"policy", "a=b; c"}, {"note", "two\nlines \\n"}, {"empty", ""}}};
  EXPECT_EQ(hello.text(), "wire_version=1\npolicy=a=b; c\nnote=two\\nlines \\\\n\nempty=\n");
  EXPECT_EQ(Hello::parse(hello.text()).fields, hello.fields);
  EXPECT_TRUE(Hello::parse("").fields.empty());
}

TEST(Hello, RefusesWhatIsNone) {
  for (const char* text : {"a", "a=1", "\n", "=1\n", "a=1\nb\n", "a=\\\n", "a=\\x\n", "a\\=1\n", "a=1\na=2\n"}) {
    EXPECT_THROW(Hello::parse(text), WireError) << text;
  }
  for (const char* key : {"", "a=b", "a\nb", "a\\b"})
    EXPECT_THROW((Hello{{{key, "1"}}}.text()), ValueError);
}

TEST(Hello, FuzzedTextIsRefusedOrRoundTrips) {
  std::mt19937 generator(1);
  for (int round = 0; round < 20000; ++round) {
    std::string text(generator() % 20, ' ');
    for (char& c : text)
      c = "ab=\n\\n "[generator() % 7];
    try {
      EXPECT_EQ(Hello::parse(text).text(), text);
    } catch (const WireError&) {
    }
  }
}

TEST(Hello, DifferencesAreNamed) {
  const Hello a{{{"version", "1"}, {"policy", "all_gather=minmax8:bucket=1024"}, {"min_bytes", "5"}}};
  Hello b = a;
  EXPECT_EQ(refusal(a, b), "");
  b.fields[1].second = "";
  b.fields[2].second = "6";
  EXPECT_EQ(refusal(a, b), "policy differs: rank 0 has 'all_gather=minmax8:bucket=1024', rank 1 has ''");
  b = a;
  b.fields.pop_back();
  EXPECT_EQ(refusal(a, b), "min_bytes differs: rank 0 has '5', rank 1 has none");
  EXPECT_EQ(refusal(b, a), "min_bytes differs: rank 0 has none, rank 1 has '5'");
  EXPECT_EQ(refusal(a, Hello{{{"error", "no such device"}}}), "rank 1: no such device");
  EXPECT_EQ(refusal(Hello{{{"error", "no such device"}}}, a), "rank 0: no such device");
}

}  // namespace
}  // namespace lowcomm
