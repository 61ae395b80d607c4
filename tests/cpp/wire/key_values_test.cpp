#include "wire/key_values.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "errors.h"
#include "wire/layout.h"

namespace lowcomm {
namespace {

std::string refusal(const KeyValues& mine, const KeyValues& theirs) {
  return test::thrownBy<WireError>([&] { expectSameFields(mine, 0, theirs, 1); });
}

TEST(KeyValues, RoundTrip) {
  const KeyValues hello{{{"wire_version", "1"}, {"policy", "a=b; c"}, {"note", "two\nlines \\n"}, {"empty", ""}}};
  EXPECT_EQ(hello.text(), "wire_version=1\npolicy=a=b; c\nnote=two\\nlines \\\\n\nempty=\n");
  EXPECT_EQ(KeyValues::parse(hello.text()).fields, hello.fields);
  EXPECT_TRUE(KeyValues::parse("").fields.empty());
}

TEST(KeyValues, RefusesWhatIsNone) {
  for (const char* text : {"a", "a=1", "\n", "=1\n", "a=1\nb\n", "a=\\\n", "a=\\x\n", "a\\=1\n", "a=1\na=2\n"}) {
    EXPECT_THROW(KeyValues::parse(text), WireError) << text;
  }
  for (const char* key : {"", "a=b", "a\nb", "a\\b"})
    EXPECT_THROW((KeyValues{{{key, "1"}}}.text()), ValueError);
}

TEST(KeyValues, DifferencesAreNamed) {
  const KeyValues a{{{"version", "1"}, {"policy", "all_gather=minmax8:bucket=1024"}, {"min_bytes", "5"}}};
  KeyValues b = a;
  EXPECT_EQ(refusal(a, b), test::kNothing);
  b.fields[1].second = "";
  b.fields[2].second = "6";
  EXPECT_EQ(refusal(a, b), "policy differs: rank 0 has 'all_gather=minmax8:bucket=1024', rank 1 has ''");
  b = a;
  b.fields.pop_back();
  EXPECT_EQ(refusal(a, b), "min_bytes differs: rank 0 has '5', rank 1 has none");
  EXPECT_EQ(refusal(b, a), "min_bytes differs: rank 0 has none, rank 1 has '5'");
  EXPECT_EQ(refusal(a, KeyValues{{{"error", "no such device"}}}), "rank 1: no such device");
  EXPECT_EQ(refusal(KeyValues{{{"error", "no such device"}}}, a), "rank 0: no such device");
}

// The texts of large layouts: what is shown is the first segment that differs, whole, and little else.
TEST(KeyValues, LongValuesAreShownWhereTheyDiffer) {
  std::vector<Segment> segments;
  for (uint64_t i = 0; i < 1000; ++i)
    segments.push_back({i * 4096, 4096, CodecSpec::parse("qsgd8")});
  const std::string text = Layout(segments).text();
  for (size_t at : {0, 1, 500, 999}) {
    std::vector<Segment> others = segments;
    others[at].codec = CodecSpec::parse("qsgd4");
    const std::string what = refusal({{{"segments", text}}}, {{{"segments", Layout(others).text()}}});
    const std::string segment = std::to_string(at * 4096) + " 4096 qsgd";
    EXPECT_NE(what.find(segment + "8:bucket=1024\\n"), std::string::npos) << what;
    EXPECT_NE(what.find(segment + "4:bucket=1024\\n"), std::string::npos) << what;
    EXPECT_EQ(what.find('\n'), std::string::npos) << what;
    EXPECT_LT(what.size(), 600u) << what;
    EXPECT_EQ(what.find("rank 0 has '...") != std::string::npos, at > 1) << what;
    EXPECT_EQ(what.find("...', rank 1") != std::string::npos, at < 999) << what;
  }
  // A value that ends where the other goes on, and one that is there on one side only.
  const std::string shorter = text.substr(0, 20000);
  EXPECT_NE(refusal({{{"a", text}}}, {{{"a", shorter}}}).find("', rank 1 has '..."), std::string::npos);
  EXPECT_LT(refusal({{{"a", text}}}, {{{"a", shorter}}}).size(), 600u);
  EXPECT_LT(refusal({{{"a", text}}}, {{{"b", text}}}).size(), 300u);
  EXPECT_LT(refusal({{{"a", ""}}}, {{{"error", text}}}).size(), 1300u);
  const std::string whole(200, 'x');
  EXPECT_EQ(refusal({{{"a", whole}}}, {{{"a", "y"}}}), "a differs: rank 0 has '" + whole + "', rank 1 has 'y'");
}

TEST(KeyValues, TextThatIsNoneIsNotRepeatedWhole) {
  const std::string junk(60000, 'x');
  for (const std::string& text : {junk, junk + "\n", "a=\\" + junk + "\n"}) {
    const std::string what = test::thrownBy<WireError>([&] { KeyValues::parse(text); });
    EXPECT_NE(what, test::kNothing);
    EXPECT_LT(what.size(), 300u);
  }
}

}  // namespace
}  // namespace lowcomm
