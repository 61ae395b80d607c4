// Carries Ethernet frames between hosts' links and a switch, later and with losses: what netem does where a kernel has
// it.
//
//   forward (WIRE TAP DELAY_US LOSS_PPB SEED)...      in the switch's namespace
//
// WIRE is the switch's end of a host's veth pair, TAP a port of the bridge. Frames from WIRE leave by TAP after
// DELAY_US, except for LOSS_PPB of 10^9 that are lost, drawn from SEED; frames from TAP leave by WIRE at once (the
// other host's link has delayed them already). One thread. Says "ready" when it forwards, answers each byte on stdin
// with a line "forwarded lost dropped" (dropped: for want of time or memory, against orders), and ends when stdin does.
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_packet.h>
#include <linux/if_tun.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr size_t kLargestFrame = 2048;       // of an MTU of 1500, offload off
constexpr int kFramesATurn = 64;             // from one device, before the others have theirs
constexpr int kSocketBytes = 64 << 20;       // so that a pause of the scheduler loses nothing
constexpr size_t kHeldBytes = 256ull << 20;  // frames that wait for their time, all hosts together

struct Frame {
  int64_t due_ns;
  std::vector<uint8_t> bytes;
};

struct Host {
  int wire;
  int tap;
  int64_t delay_ns;
  uint64_t loss_ppb;
  std::mt19937_64 random;
  std::deque<Frame> waiting;  // in order of time: a host's delay is one
};

struct Counts {
  uint64_t forwarded = 0, lost = 0, dropped = 0;
};

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "forward: %s: %s\n", what.c_str(), std::strerror(errno));
  std::exit(1);
}

int64_t nowNs() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

int openWire(const std::string& device) {
  const int fd = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK, htons(ETH_P_ALL));
  if (fd < 0) fail("socket(AF_PACKET)");
  const int one = 1;
  // Else every frame that we put onto the wire would come back to us.
  if (setsockopt(fd, SOL_PACKET, PACKET_IGNORE_OUTGOING, &one, sizeof one)) fail("PACKET_IGNORE_OUTGOING");
  if (setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &kSocketBytes, sizeof kSocketBytes)) fail("SO_RCVBUFFORCE");
  if (setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &kSocketBytes, sizeof kSocketBytes)) fail("SO_SNDBUFFORCE");
  sockaddr_ll address{};
  address.sll_family = AF_PACKET;
  address.sll_protocol = htons(ETH_P_ALL);
  address.sll_ifindex = static_cast<int>(if_nametoindex(device.c_str()));
  if (address.sll_ifindex == 0 || bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address)) fail(device);
  return fd;
}

int openTap(const std::string& device) {
  const int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
  if (fd < 0) fail("/dev/net/tun");
  ifreq request{};
  request.ifr_flags = IFF_TAP | IFF_NO_PI;
  std::strncpy(request.ifr_name, device.c_str(), IFNAMSIZ - 1);
  if (ioctl(fd, TUNSETIFF, &request)) fail(device);
  return fd;
}

void takeFromWire(Host& host, size_t& held, Counts& counts) {
  uint8_t buffer[kLargestFrame];
  for (int i = 0; i < kFramesATurn; ++i) {
    const ssize_t size = recv(host.wire, buffer, sizeof buffer, MSG_TRUNC);
    if (size < 0) return;
    if (host.loss_ppb && host.random() % 1'000'000'000 < host.loss_ppb) {
      ++counts.lost;
    } else if (static_cast<size_t>(size) > sizeof buffer || held + size > kHeldBytes) {
      ++counts.dropped;
    } else {
      host.waiting.push_back({nowNs() + host.delay_ns, {buffer, buffer + size}});
      held += static_cast<size_t>(size);
    }
  }
}

void sendWhatIsDue(Host& host, size_t& held, Counts& counts) {
  while (!host.waiting.empty() && host.waiting.front().due_ns <= nowNs()) {
    const auto& bytes = host.waiting.front().bytes;
    ++(write(host.tap, bytes.data(), bytes.size()) < 0 ? counts.dropped : counts.forwarded);
    held -= bytes.size();
    host.waiting.pop_front();
  }
}

void takeFromTap(Host& host, Counts& counts) {
  uint8_t buffer[kLargestFrame];
  for (int i = 0; i < kFramesATurn; ++i) {
    const ssize_t size = read(host.tap, buffer, sizeof buffer);
    if (size < 0) return;
    if (send(host.wire, buffer, static_cast<size_t>(size), 0) >= 0) {
      ++counts.forwarded;
    } else if (errno != ENOBUFS) {  // ENOBUFS: the shaper's queue is full and has dropped it, as it is there to do
      ++counts.dropped;
    }
  }
}

bool answer(const std::vector<Host>& hosts, Counts& counts) {
  char asked;
  if (read(STDIN_FILENO, &asked, 1) <= 0) return false;
  for (const Host& host : hosts) {
    tpacket_stats stats{};  // of the time since it was last read
    socklen_t size = sizeof stats;
    if (getsockopt(host.wire, SOL_PACKET, PACKET_STATISTICS, &stats, &size)) fail("PACKET_STATISTICS");
    counts.dropped += stats.tp_drops;
  }
  std::printf("%llu %llu %llu\n", static_cast<unsigned long long>(counts.forwarded),
              static_cast<unsigned long long>(counts.lost), static_cast<unsigned long long>(counts.dropped));
  std::fflush(stdout);
  return true;
}

timespec untilNextDue(const std::vector<Host>& hosts) {
  int64_t due = INT64_MAX;
  for (const Host& host : hosts)
    if (!host.waiting.empty()) due = std::min(due, host.waiting.front().due_ns);
  const int64_t ns = due == INT64_MAX ? 1'000'000'000 : std::max<int64_t>(0, due - nowNs());
  return {ns / 1'000'000'000, ns % 1'000'000'000};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 6 || (argc - 1) % 5 != 0) {
    std::fprintf(stderr, "forward: expected (WIRE TAP DELAY_US LOSS_PPB SEED)..., got %d arguments\n", argc - 1);
    return 2;
  }
  prctl(PR_SET_TIMERSLACK, 1UL);  // the default makes every delay 50 us longer
  std::vector<Host> hosts;
  for (int i = 1; i < argc; i += 5) {
    hosts.push_back({openWire(argv[i]),
                     openTap(argv[i + 1]),
                     std::atoll(argv[i + 2]) * 1000,
                     std::strtoull(argv[i + 3], nullptr, 10),
                     std::mt19937_64(std::strtoull(argv[i + 4], nullptr, 10)),
                     {}});
  }
  std::puts("ready");
  std::fflush(stdout);

  Counts counts;
  size_t held = 0;
  std::vector<pollfd> fds{{STDIN_FILENO, POLLIN, 0}};
  for (const Host& host : hosts) {
    fds.push_back({host.wire, POLLIN, 0});
    fds.push_back({host.tap, POLLIN, 0});
  }
  while (true) {
    const timespec wait = untilNextDue(hosts);
    if (ppoll(fds.data(), fds.size(), &wait, nullptr) < 0 && errno != EINTR) fail("ppoll");
    if (fds[0].revents && !answer(hosts, counts)) return 0;
    for (size_t i = 0; i < hosts.size(); ++i) {
      if (fds[1 + 2 * i].revents) takeFromWire(hosts[i], held, counts);
      sendWhatIsDue(hosts[i], held, counts);
      if (fds[2 + 2 * i].revents) takeFromTap(hosts[i], counts);
    }
  }
}
