// The flight record: what it holds, in which order, what leaves it, and that it is written where an op is lost.
#include "engine/flight.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <future>
#include <sstream>

#include "collective/collectives.h"
#include "collective_cases.h"
#include "p2p_cases.h"
#include "ranks_on_threads.h"

namespace lowcomm {
namespace {

using std::chrono::milliseconds;
using test::holds;
using test::Outcome;
using test::Ranks;
using Status = OpProgress::Status;

// A folder of the test's own.
class Folder {
 public:
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "flight-XXXXXX").string();
    if (!mkdtemp(name.data())) throw std::runtime_error("no folder " + name);
    path_ = name;
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path_))
      names.push_back(entry.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
  }
  std::string read(const std::string& name) const {
    std::ifstream file(path_ + "/" + name);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
  }

 private:
  std::string path_;
};

Ranks recording(int size, size_t entries, const std::string& folder) {
  return Ranks(size, [=](int, GroupConfig& config) {
    config.group = "a/b \"c\"";
    config.flight_record = entries;
    config.flight_folder = folder;
  });
}

// all_gather of as many elements as make `frames` frames.
void gather(OpContext& op, uint64_t frames) {
  const uint64_t elements = frames * 16384;
  const std::vector<float> input(elements, 1);
  std::vector<std::vector<float>> outputs(op.group.size(), std::vector<float>(elements));
  GatherMessage message{{test::single(elements, "none")}, DType::float32, input.data()};
  for (auto& output : outputs)
    message.outputs.push_back(output.data());
  allGather(op, {message});
}

TEST(Flight, BytesAreTheOps) {
  Ranks ranks = recording(2, 3, "");
  const OpCounters moved = ranks.expectRun("op", [](int, OpContext& context) { gather(context, 7); })[0];
  ranks.engine(0).drain();
  EXPECT_GT(moved.wire_bytes, 7u * 65536);
  EXPECT_TRUE(
      holds(ranks.engine(0).record().json(), {"\"group\": \"a/b \\\"c\\\"\"", "\"rank\": 0, \"global_rank\": null",
                                              "\"sent_bytes\": " + std::to_string(moved.wire_bytes) +
                                                  ", \"received_bytes\": " + std::to_string(moved.received_bytes)}));
}

TEST(Flight, WhatIsUnderWayStays) {
  MemoryHub hub(1);
  const auto transport = hub.transport(0);
  const GroupContext group(*transport, {});
  FlightRecord record(group, 3, "");
  const auto add = [&](const char* op, Status status) {
    auto progress = record.add(op, 1);
    progress->update([&](OpProgress::State& state) {
      if (status != Status::queued) state.start();
      if (status == Status::done) state.end("");
    });
  };
  add("stuck", Status::under_way);
  add("over", Status::done);
  add("queued1", Status::queued);
  add("queued2", Status::queued);  // "over" leaves
  EXPECT_EQ(record.json().find("\"over\""), std::string::npos);
  add("queued3", Status::queued);  // the oldest that is queued does
  EXPECT_EQ(record.json().find("\"queued1\""), std::string::npos);
  EXPECT_TRUE(holds(record.json(), {"\"stuck\"", "\"queued2\"", "\"queued3\"", "\"description\": {}",
                                    "\"started_s\": null, \"ended_s\": null"}));
}

TEST(Flight, NothingIsRecordedWhereNobodyWantsIt) {
  Folder folder;
  Ranks ranks = recording(2, 0, folder.path());
  ranks.expectRun("op", [](int, OpContext& context) {
    EXPECT_EQ(context.progress, nullptr);
    gather(context, 1);
  });
  ranks.engine(0).abort("enough");
  EXPECT_EQ(ranks.engine(0).endedWhy(), "enough");
  EXPECT_TRUE(holds(ranks.engine(0).record().json(), {"\"ops\": []"}));
  EXPECT_TRUE(folder.files().empty());
}

TEST(Flight, AnAbortLeavesAFileOfWhatWasUnderWay) {
  Folder folder;
  Ranks ranks = recording(2, 8, folder.path());
  std::promise<void> waiting;
  std::vector<std::future<Outcome>> pending;
  pending.push_back(ranks.start(0, "slow", [&](int, OpContext& context) {
    waiting.set_value();
    gather(context, 7);
  }));
  waiting.get_future().wait();
  while (ranks.engine(0).record().json().find("\"frame\": 0") == std::string::npos)
    std::this_thread::sleep_for(milliseconds(1));
  ranks.engine(0).abort("the user asked");
  const auto outcomes = ranks.finish(std::move(pending));
  const std::string name = "lowcomm-flight-a_b__c_-rank0-pid" + std::to_string(getpid()) + "-epoch0.json";
  EXPECT_EQ(folder.files(), std::vector<std::string>{name}) << "nothing half written";
  EXPECT_TRUE(holds(outcomes[0].what(), {"the user asked", folder.path() + "/" + name}));
  EXPECT_TRUE(holds(folder.read(name),
                    {"\"because\": \"the user asked\"", "\"op\": \"slow\", \"sequence\": 1, \"state\": \"under way\"",
                     "{\"rank\": 1, \"received\": 0, \"expected\": 8}"}));
}

TEST(Flight, AFileThatCannotBeWrittenMasksNothing) {
  Ranks ranks = recording(2, 8, "/proc/no such folder");
  ranks.engine(0).abort("the user asked");
  EXPECT_TRUE(
      holds(ranks.engine(0).endedWhy(), {"the user asked; the flight record could not be written to /proc/no"}));
}

TEST(Flight, ACallersMistakeIsAFailedOpAndNoFile) {
  Folder folder;
  Ranks ranks = recording(2, 8, folder.path());
  ranks.run("wrong", [](int, OpContext&) { throw ValueError("too \"long\"\n"); });
  ranks.engine(1).drain();
  EXPECT_TRUE(
      holds(ranks.engine(1).record().json(), {"\"state\": \"failed\"", "\"error\": \"too \\\"long\\\"\\u000a\""}));
  EXPECT_TRUE(folder.files().empty());
}

// Gloo's messages hold an emoji, and a peer's are cut where they are too long.
TEST(Flight, TextIsUtf8WhateverAMessageHolds) {
  MemoryHub hub(1);
  const auto transport = hub.transport(0);
  const GroupContext group(*transport, {});
  FlightRecord record(group, 1, "");
  for (const char* whole : {"\xc3\xa9", "\xe2\x82\xac", "\xed\x9f\xbf", "\xf0\x9f\x8f\x96", "\xf4\x8f\xbf\xbf"}) {
    record.add(whole, 1);
    EXPECT_TRUE(holds(record.json(), {std::string("\"") + whole + "\""}));
    record.add(std::string(whole).substr(0, strlen(whole) - 1) + "x", 1);
    EXPECT_TRUE(holds(record.json(), {"\\ufffd", "x\", "}));
    EXPECT_EQ(record.json().find(whole), std::string::npos);
  }
  for (const char* wrong : {"\xc0\x80", "\xe0\x80\x80", "\xed\xa0\x80", "\xf0\x80\x80\x80", "\xf4\x90\x80\x80",
                            "\xf8\x80\x80\x80", "\x80", "\xff"}) {
    record.add(wrong, 1);
    const std::string text = record.json();
    EXPECT_TRUE(std::all_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x80; }));
  }
}

TEST(Flight, MessagesStandInItToo) {
  Ranks ranks = recording(2, 8, "");
  const test::Tensor x = test::Tensor::random(300000, 1);
  test::Tensor y = x.empty();
  const auto received = test::receiving(ranks.engine(1), y, 0, 7);
  EXPECT_TRUE(holds(ranks.engine(1).record().json(),
                    {"\"op\": \"recv with tag 7\", \"sequence\": 1, \"state\": \"under way\"", "\"peer\": \"0\"",
                     "\"elements\": \"300000\"", "\"codec\": \"sym4:bucket=1024\"", "{\"rank\": 0, \"received\": 0"}));
  const auto sent = test::sending(ranks.engine(0), x, 1, 7);
  test::together(ranks, [&](int rank, Engine& engine) { test::expectFinish(engine, rank == 0 ? sent : received); });
  for (int rank : {0, 1}) {
    EXPECT_TRUE(holds(ranks.engine(rank).record().json(),
                      {rank == 0 ? "send with tag 7" : "recv with tag 7", "\"state\": \"done\"", "\"missing\": []"}));
  }
}

}  // namespace
}  // namespace lowcomm
