#include "file_rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <system_error>
#include <thread>
#include <utility>

#include "base/error.h"

namespace lowcomm {
namespace {

using std::chrono::milliseconds;
namespace files = std::filesystem;

constexpr milliseconds kPoll{10};

}  // namespace

FileRendezvous::FileRendezvous(files::path folder) : folder_(std::move(folder)) {
  std::error_code error;
  files::create_directories(folder_, error);
  if (error) throw ValueError("rendezvous: expected a folder, got " + folder_.string() + ": " + error.message());
}

files::path FileRendezvous::pathOf(const std::string& key) const {
  std::string name = key;
  std::replace(name.begin(), name.end(), '/', '+');
  return folder_ / name;
}

// A link, so that the file is whole when it is there, and no other's is replaced.
void FileRendezvous::set(const std::string& key, const std::string& value) {
  const files::path path = pathOf(key);
  const files::path own = path.string() + "." + std::to_string(::getpid()) + ".new";
  {
    std::ofstream file(own, std::ios::binary);
    file << value;
    if (!file.flush()) throw ValueError("rendezvous: expected to write " + own.string() + ", could not");
  }
  std::error_code error, ignored;
  files::create_hard_link(own, path, error);
  files::remove(own, ignored);
  if (error == std::errc::file_exists)
    throw ValueError("rendezvous: expected a folder of this run alone, got " + path.string() + " of another");
  if (error) throw ValueError("rendezvous: expected to make " + path.string() + ": " + error.message());
}

std::string FileRendezvous::get(const std::string& key, milliseconds timeout) {
  const auto end = std::chrono::steady_clock::now() + timeout;
  while (!files::exists(pathOf(key))) {
    if (std::chrono::steady_clock::now() > end) {
      throw ValueError("rendezvous: expected " + pathOf(key).string() + " within " + std::to_string(timeout.count()) +
                       " ms, it is not there");
    }
    std::this_thread::sleep_for(kPoll);
  }
  std::ifstream file(pathOf(key), std::ios::binary);
  if (!file) throw ValueError("rendezvous: expected to read " + pathOf(key).string() + ", could not");
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace lowcomm
