#pragma once

#include <cstdint>
#include <string>

namespace lowcomm::tcp {

// The congestion control of a channel's sockets: what LOWCOMM_CONGESTION names, else one for the least round-trip time
// that was seen: Reno below a millisecond, where BBR's flows take turns badly, and BBR above, where losses would stop
// the others. Where the kernel allows neither, the system's.

// Of a socket that is yet to connect or to listen; what it accepts begins alike. It begins with Reno: a
// socket on which BBR has run stays paced under any other, and after each pause the pace is that of a connection just
// made.
void beginCongestion(int fd);

// Of a connected socket: judges the round-trip time, again and again, for a connection that was made on a full
// link has not seen the least one yet.
void judgeCongestion(int fd);

// What the kernel says of a connected socket; fields that it does not know are 0 or empty.
struct SocketReport {
  double round_trip_s = 0, least_round_trip_s = 0;
  uint64_t retransmitted = 0;  // segments
  std::string congestion;
};
SocketReport reportOf(int fd);

// Whether the kernel allows this process what LOWCOMM_CONGESTION names; `fd`: a TCP socket. ValueError where not.
void checkCongestion(int fd);

}  // namespace lowcomm::tcp
