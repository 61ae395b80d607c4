#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

// How fast bytes leave: by the congestion control of each socket, and by the rate of the process.

namespace lowcomm::tcp {

// The congestion control of a channel's sockets: what LOWCOMM_CONGESTION names, else one for the least round-trip time
// that was seen: Reno below a millisecond, where BBR's flows take turns badly, and BBR above, where losses would stop
// the others. Cubic above where a peer has several connections (connectionsOver). Where the kernel allows neither, the
// one that was there.

// Prepares a socket that is yet to connect or to listen; sockets that it accepts begin alike. It begins with Reno: a
// socket on which BBR has run stays paced under any other, and after each pause the pace is that of a new connection.
void beginCongestion(int fd);

// The kernel says this of a connected socket; fields that it does not know are 0 or empty.
struct SocketReport {
  double round_trip_s = 0, least_round_trip_s = 0;
  uint64_t retransmitted = 0;  // segments
  double delivered_a_s = 0;    // bytes, lately
  uint64_t acknowledged_bytes = 0;
  double busy_s = 0;  // ConnectionReport
  std::string congestion;
};
SocketReport reportOf(int fd);

// How a connection is to send.
struct SendPolicy {
  const char* congestion;  // "reno", "bbr" or "cubic"

  // Bytes of a piece: what the connection delivers in a moment, so that a fast link costs few calls of the system and a
  // slow one is not taken for long; at least 64 KiB, four full records of TLS, with the piece's header.
  size_t piece_bytes = 0;

  // For how long the kernel may take nothing more of a message before others are begun: on a link of near hosts it
  // takes some each time that 16 KiB have left (connection.cpp), 13 ms at 10 Mbit/s, and if others were begun sooner,
  // as many flows as there are peers would share the link and its queue run over. Far away it may wait for a round
  // trip, in which others fill the link.
  std::chrono::milliseconds patience{0};
};
SendPolicy mannerFor(const SocketReport& report, bool is_one_of_several = false);

// Sets the congestion control that fits a connected socket, unless LOWCOMM_CONGESTION names one. Called repeatedly: a
// connection that was made on a full link has not measured the least round trip yet.
SendPolicy judge(int fd, bool is_one_of_several = false);

// Whether the kernel allows this process what LOWCOMM_CONGESTION names; `fd`: a TCP socket. ValueError where not.
void checkCongestion(int fd);

// Whether this process's congestion control, far away, takes every lost segment for a full link: LOWCOMM_CONGESTION
// names another one than BBR, or the kernel does not allow that.
bool isLossBased();

// How many connections of the bulk lane two ranks need, where one of BBR does not do: one of them is loss-based, or the
// group has more than two ranks, and BBR's flows to several peers share a link badly. A loss-based connection carries
// at most 1.22 segments a round trip / √(share lost) (Mathis et al. 1997, "The macroscopic behavior of the TCP
// congestion avoidance algorithm", equation 3): 11 Mbit/s with 40 ms and 0.1 %, whatever the link has. Several carry as
// many times that, and share it evenly. Fewer each in a large group, for a process has not that many descriptors.
inline constexpr int kFarConnections = 16, kFarConnectionsOfARank = 128;
int connectionsOver(double least_round_trip_s, int group_size);

// How fast the bulk lanes of a process may send, all together, on a link that it shares: LOWCOMM_RATE. Used by the
// endpoint's thread alone.
class Pace {
 public:
  using Clock = std::chrono::steady_clock;

  // "50mbit": a number and kbit, mbit or gbit a second; empty: no bound. ValueError naming LOWCOMM_RATE.
  explicit Pace(const std::string& rate);

  // For how long nothing may be sent; 0: something may.
  Clock::duration wait() const;

  void sent(size_t bytes);

 private:
  double s_a_byte_ = 0;
  Clock::time_point next_{};  // when what was sent will have left at the rate
};

}  // namespace lowcomm::tcp
