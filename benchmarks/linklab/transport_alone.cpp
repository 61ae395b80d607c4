// One of two ranks that exchange messages over lowcomm's TCP transport alone: no group, no frames, no checksums.
//
// Usage: transport_alone FOLDER RANK BYTES: where both meet (FileRendezvous), 0 or 1, of a message. For each line of
// its input it sends a message and receives one at once, and prints when that began and ended, in seconds of the
// monotonic clock, and the CPU seconds of this process until both ranks are through.
#include <sys/resource.h>
#include <time.h>

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "transport/file_rendezvous.h"
#include "transport/tcp/tcp.h"

namespace {

using lowcomm::Lane;

constexpr std::chrono::seconds kDeadline{60};

double now() {
  timespec time{};
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

double cpu() {
  rusage used{};
  ::getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

void exchange(lowcomm::Transport& transport, int peer, const std::vector<std::byte>& out, std::vector<std::byte>& in) {
  const auto receiving = transport.irecv(Lane::bulk, peer, 0, in);
  const auto sending = transport.isend(Lane::bulk, peer, 0, out);
  receiving->wait(kDeadline);
  sending->wait(kDeadline);
}

void run(const std::string& folder, int rank, size_t bytes) {
  lowcomm::FileRendezvous rendezvous(folder);
  const auto transport = lowcomm::connectTcp(rendezvous, rank, 2, /*connections=*/1, kDeadline);
  std::vector<std::byte> out(bytes, std::byte{1}), in(bytes), done(1), both_done(1);
  for (std::string line; std::getline(std::cin, line);) {
    const double cpu_before = cpu(), begin = now();
    exchange(*transport, 1 - rank, out, in);
    const double end = now();
    exchange(*transport, 1 - rank, done, both_done);
    std::printf("%.9f %.9f %.6f\n", begin, end, cpu() - cpu_before);
    std::fflush(stdout);
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) {
    std::fprintf(stderr, "usage: transport_alone FOLDER RANK BYTES\n");
    return 2;
  }
  try {
    run(arguments[1], std::atoi(arguments[2]), static_cast<size_t>(std::atoll(arguments[3])));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "transport_alone: %s\n", error.what());
    return 1;
  }
  return 0;
}
