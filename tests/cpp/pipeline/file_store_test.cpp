// Slots in a file (SLOT_FILE.md): found again, whatever was cut off; another file is refused by name.
#include "pipeline/file_store.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/hashes.h"
#include "errors.h"

namespace lowcomm {
namespace {

namespace fs = std::filesystem;

constexpr size_t kSlot = 100;
const SlotFileHeader kHeader{50, 5, kSlot, "float16", "0.0.sent", "a run"};

struct SlotFile {
  explicit SlotFile(const std::string& name)
      : path((fs::temp_directory_path() / ("lowcomm_" + std::to_string(getpid()) + "_" + name)).string()) {
    fs::remove(path);
  }
  ~SlotFile() { fs::remove(path); }
  std::unique_ptr<FileStore> open(const SlotFileHeader& header = kHeader) const {
    return std::make_unique<FileStore>(path, header);
  }
  // The error of opening it.
  std::string refusal(const SlotFileHeader& header = kHeader) const {
    return test::thrownBy([&] { open(header); });
  }
  std::string read() const {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void overwrite(size_t at, const std::string& bytes) const {
    std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(static_cast<std::streamoff>(at));
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }
  const std::string path;
};

std::vector<std::byte> slotOf(uint64_t sample, uint32_t version, size_t bytes = kSlot) {
  std::vector<std::byte> slot(bytes);
  for (size_t i = 0; i < bytes; ++i)
    slot[i] = static_cast<std::byte>(sample * 31 + version * 7 + i);
  return slot;
}

void write(SlotStore& store, uint64_t sample, uint32_t version) {
  store.write(sample, version, slotOf(sample, version).data());
}

void expectSlot(SlotStore& store, uint64_t sample, uint32_t version) {
  std::vector<std::byte> slot(kSlot);
  ASSERT_EQ(store.version(sample), version) << sample;
  store.read(sample, slot.data());
  EXPECT_EQ(slot, slotOf(sample, version)) << sample;
}

TEST(FileStore, SlotsAreFoundAgain) {
  const SlotFile file("again");
  std::vector<SlotSummary> table;
  {
    const auto store = file.open();
    for (uint64_t sample = 0; sample < 300; ++sample)  // more than two groups
      write(*store, sample * 1000, 1);
    for (uint64_t sample = 0; sample < 300; sample += 2)
      write(*store, sample * 1000, 2);
    store->forget(7000);
    store->forget(7000);
    table = store->table();
    EXPECT_EQ(store->slots(), 299u);
  }
  const auto store = file.open();
  EXPECT_EQ(store->table(), table);
  EXPECT_EQ(store->forgotten().size(), 0u);
  for (uint64_t sample = 0; sample < 300; ++sample) {
    if (sample != 7) expectSlot(*store, sample * 1000, sample % 2 == 0 ? 2 : 1);
  }
  EXPECT_EQ(store->version(7000), 0u);
  const size_t size = fs::file_size(file.path);
  write(*store, 5, 1);
  EXPECT_EQ(fs::file_size(file.path), size) << "a free place is used again";
}

TEST(FileStore, AFileThatIsCutIsToldOnce) {
  const SlotFile file("cut_under_way");
  const auto store = file.open();
  for (uint64_t sample = 0; sample < 10; ++sample)
    write(*store, sample, 1);
  fs::resize_file(file.path, 8192 + 3 * 128);
  store->recheck();
  EXPECT_EQ(store->slots(), 10u) << "nothing was found damaged";
  std::vector<std::byte> slot(kSlot);
  EXPECT_THROW(store->read(5, slot.data()), FileError);
  EXPECT_EQ(store->slots(), 9u);
  store->recheck();
  EXPECT_EQ(store->slots(), 3u);
  EXPECT_EQ(store->forgotten().at("damaged"), 7u);
  expectSlot(*store, 2, 1);
  write(*store, 5, 1);
  expectSlot(*store, 5, 1);
}

// The document's bytes, and those of a file as a whole.
TEST(FileStore, Golden) {
  const SlotFile file("golden");
  {
    const auto store = file.open();
    write(*store, 0x0102030405060708, 1);
    write(*store, 9, 1);
    write(*store, 9, 2);
  }
  const std::string bytes = file.read();
  ASSERT_EQ(bytes.size(), 4096 + 4096 + 128 + kSlot);
  EXPECT_EQ(bytes.substr(0, 16), std::string("lcslots\n\x04\x03\x02\x01\x01\0\0\0", 16));
  EXPECT_EQ(bytes.substr(16, 16), std::string("\x32\0\0\0\0\0\0\0\x05\0\0\0\0\0\0\0", 16));
  EXPECT_EQ(bytes.substr(32, 16), std::string("\x64\0\0\0\0\0\0\0\x80\0\0\0\x28\0\0\0", 16));
  EXPECT_EQ(bytes.substr(48, 45), "format=float16\nplace=0.0.sent\nrun=a run\n" + std::string(5, '\0'));
  const std::vector<std::byte> second = slotOf(9, 2);
  uint32_t entry[8];
  std::memcpy(entry, bytes.data() + 4096 + 32, 32);
  EXPECT_EQ(entry[0], 9u);
  EXPECT_EQ(entry[2], 2u);
  EXPECT_EQ(entry[3], crc32c(second.data(), kSlot));
  EXPECT_EQ(entry[4], 1u);
  EXPECT_EQ(entry[7], crc32c(entry, 28));
  EXPECT_EQ(std::memcmp(bytes.data() + 8192 + 128, second.data(), kSlot), 0);
  EXPECT_EQ(crc32c(bytes.data(), bytes.size()), 0x60e6b2b9u);
}

TEST(FileStore, AnotherFileIsRefusedWithBothValues) {
  const SlotFile file("other");
  write(*file.open(), 1, 1);
  EXPECT_EQ(file.refusal(), test::kNothing);
  const auto with = [](auto change) {
    SlotFileHeader header = kHeader;
    change(header);
    return header;
  };
  const std::string name = "slot file '" + file.path + "': ";
  EXPECT_EQ(file.refusal(with([](auto& h) { h.run = "b"; })), name + "run: expected 'b', got 'a run'");
  EXPECT_EQ(file.refusal(with([](auto& h) { h.place = "1.0.sent"; })),
            name + "place: expected '1.0.sent', got '0.0.sent'");
  EXPECT_EQ(file.refusal(with([](auto& h) { h.format = "sym8"; })), name + "format: expected 'sym8', got 'float16'");
  EXPECT_EQ(file.refusal(with([](auto& h) { h.elements = 51; })), name + "elements: expected 51, got 50");
  EXPECT_EQ(file.refusal(with([](auto& h) { h.slot_bytes = 99; })), name + "bytes of a slot: expected 99, got 100");
  EXPECT_NE(file.refusal(with([](auto& h) { h.run = "two\nlines"; })), test::kNothing);
  EXPECT_EQ(file.refusal(with([](auto& h) { h.channels = 10; })), name + "channels: expected 10, got 5");
  EXPECT_EQ(FileStore::headerOf(file.path).elements, 50u);
  const std::string whole = file.read();
  const auto refusalOf = [&](size_t at, const std::string& bytes) {
    file.overwrite(at, bytes);
    const std::string why = file.refusal();
    file.overwrite(0, whole);
    return why;
  };
  EXPECT_EQ(refusalOf(0, "PK"), name + "kind: expected a file of slots, got another file");
  EXPECT_EQ(refusalOf(8, std::string("\x01\x02\x03\x04", 4)),
            name + "byte order: expected this machine's, got another one");
  EXPECT_EQ(refusalOf(12, "\x02"), name + "version: expected 1, got 2");
  EXPECT_NE(refusalOf(16, "\x33").find("(damaged)"), std::string::npos);
  EXPECT_EQ(file.refusal(), test::kNothing);
  fs::resize_file(file.path, 1000);
  EXPECT_EQ(file.refusal(), name + "header: expected 4096 bytes, got 1000 (cut)");
  EXPECT_NE(SlotFile("no/such/folder").refusal().find("could not open"), std::string::npos);
}

TEST(FileStore, OneProcessAtATime) {
  const SlotFile file("locked");
  const auto store = file.open();
  EXPECT_NE(file.refusal().find("which another cache has open"), std::string::npos);
  store->close();
  EXPECT_EQ(file.refusal(), test::kNothing);
  EXPECT_THROW(store->version(1), ValueError);
}

// Damage is found on opening, forgotten and counted; the other slots stay.
TEST(FileStore, DamagedSlotsAreForgotten) {
  const SlotFile file("damaged");
  {
    const auto store = file.open();
    for (uint64_t sample = 0; sample < 6; ++sample)
      write(*store, sample, 1);
  }
  file.overwrite(8192 + 1 * 128 + 50, "x");         // in slot 1
  file.overwrite(4096 + 2 * 32 + 8, "x");           // in the entry of slot 2
  fs::resize_file(file.path, 8192 + 5 * 128 + 20);  // in slot 5
  const auto store = file.open();
  EXPECT_EQ(store->forgotten(), (std::map<std::string, uint64_t>{{"damaged", 3}}));
  EXPECT_EQ(store->slots(), 3u);
  for (uint64_t sample : {0, 3, 4})
    expectSlot(*store, sample, 1);
  write(*store, 1, 1);
  expectSlot(*store, 1, 1);

  // Damage that comes later is an error, once; the sample is then forgotten.
  file.overwrite(8192 + 3 * 128, "x");
  std::vector<std::byte> slot(kSlot);
  EXPECT_THROW(store->read(3, slot.data()), FileError);
  EXPECT_EQ(store->version(3), 0u);
  EXPECT_EQ(store->forgotten().at("damaged"), 4u);
}

TEST(FileStore, AFullDiskIsAnErrorAndLosesTheSlotAlone) {
  const SlotFile file("full");
  const auto store = file.open();
  write(*store, 1, 1);
  write(*store, 2, 1);
  rlimit before;
  getrlimit(RLIMIT_FSIZE, &before);
  signal(SIGXFSZ, SIG_IGN);
  const rlimit limit{8192 + 2 * 128 + 10, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &limit);
  std::string why;
  try {
    write(*store, 3, 1);
  } catch (const FileError& error) {
    why = error.what();
    EXPECT_EQ(error.code, EFBIG);
    EXPECT_EQ(error.path, file.path);
  }
  setrlimit(RLIMIT_FSIZE, &before);
  signal(SIGXFSZ, SIG_DFL);
  EXPECT_NE(why.find("could not write 100 bytes at byte 8448"), std::string::npos) << why;
  EXPECT_EQ(store->version(3), 0u);
  expectSlot(*store, 1, 1);
  store->close();
  EXPECT_EQ(file.open()->forgotten(), (std::map<std::string, uint64_t>{{"cut_off", 1}}));
}

// A process that is killed at any point of a write leaves each slot whole or forgotten.
TEST(FileStore, AKilledWriterLeavesNoTornSlot) {
  constexpr size_t kLarge = 1 << 20;
  const SlotFileHeader header{kLarge, 1, kLarge, "int8", "0.0.sent", ""};
  for (int round = 0; round < 8; ++round) {
    const SlotFile file("killed");
    {
      file.open(header);
    }
    const pid_t child = fork();
    if (child == 0) {
      FileStore store(file.path, header);
      for (uint32_t version = 1;; ++version) {
        for (uint64_t sample = 0; sample < 4; ++sample)
          store.write(sample, version, slotOf(sample, version, kLarge).data());
      }
    }
    usleep(20'000 + 7'001 * round);
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    const auto store = file.open(header);
    std::vector<std::byte> slot(kLarge);
    for (const SlotSummary& found : store->table()) {
      store->read(found.sample, slot.data());
      EXPECT_EQ(slot, slotOf(found.sample, found.version, kLarge));
    }
    const auto forgotten = store->forgotten();
    EXPECT_FALSE(forgotten.contains("damaged"));
    EXPECT_LE(forgotten.contains("cut_off") ? forgotten.at("cut_off") : 0, 1u);
  }
}

}  // namespace
}  // namespace lowcomm
