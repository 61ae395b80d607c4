// The options of an endpoint that the environment names (endpoint.h).
#include <cstdlib>
#include <string>

#include "base/error.h"
#include "transport/tcp/endpoint.h"

namespace lowcomm::tcp {
namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

bool flagFromEnv(const char* name) {
  const std::string text = variable(name);
  if (text != "" && text != "0" && text != "1")
    throw ValueError(std::string(name) + ": expected 0 or 1, got '" + text + "'");
  return text == "1";
}

// A port that several processes of a machine are given counts from LOCAL_RANK.
std::string withLocalRank(const char* name) {
  const std::string text = variable(name);
  if (text.empty()) return text;
  const auto [host, port] = hostAndPort(text, name);
  char* end = nullptr;
  const long number = std::strtol(port.c_str(), &end, 10);
  const long rank = std::strtol(variable("LOCAL_RANK").c_str(), nullptr, 10);
  if (*end != '\0' || number < 0 || number + rank > 65535) {
    throw ValueError(std::string(name) + ": expected a port of 0 ... 65535, LOCAL_RANK included, got '" + text + "'");
  }
  return joined(host, std::to_string(number == 0 ? 0 : number + rank));
}

}  // namespace

EndpointOptions EndpointOptions::fromEnvironment() {
  EndpointOptions options{withLocalRank("LOWCOMM_LISTEN"),
                          withLocalRank("LOWCOMM_ADVERTISE"),
                          variable("LOWCOMM_SOCKET_IFNAME"),
                          variable("LOWCOMM_RATE"),
                          flagFromEnv("LOWCOMM_DIAL_ONLY"),
                          variable("LOWCOMM_RELAY"),
                          false,
                          Secret::fromEnvironment()};
  if (options.interface.empty()) options.interface = variable("GLOO_SOCKET_IFNAME");
  if (options.dials_only && !(options.listen.empty() && options.advertise.empty()))
    throw ValueError("LOWCOMM_DIAL_ONLY: expected no LOWCOMM_LISTEN and no LOWCOMM_ADVERTISE beside it, got one");
  return options;
}

}  // namespace lowcomm::tcp
