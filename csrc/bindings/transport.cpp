#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/store.h"
#include "bindings/bindings.h"
#include "tensor/errors.h"
#include "transport/tcp/endpoint.h"
#include "transport/tcp/secret.h"
#include "transport/tcp/tls.h"

namespace py = pybind11;

namespace lowcomm {
namespace {

struct RelayProcess {
  explicit RelayProcess(const std::string& listen)
      : endpoint({.listen = listen, .relays_all = true, .secret = tcp::Secret::fromEnvironment()}) {}
  tcp::Endpoint endpoint;
};

py::list connectionsOf(LowcommBackend& backend) {
  const Engine* engine = backend.parts().group.running();
  const auto reports = engine ? engine->connections() : std::vector<ConnectionReport>();
  py::list found;
  for (const ConnectionReport& report : reports) {
    py::dict entry;
    entry["peer"] = report.peer;
    entry["lane"] = report.lane == Lane::control ? "control" : "bulk " + std::to_string(report.number);
    entry["connected"] = report.is_connected;
    entry["times_made"] = report.times_made;
    entry["sent_bytes"] = report.sent_bytes;
    entry["received_bytes"] = report.received_bytes;
    entry["retransmitted"] = report.retransmitted;
    entry["round_trip_s"] = report.round_trip_s;
    entry["least_round_trip_s"] = report.least_round_trip_s;
    entry["congestion"] = report.congestion;
    entry["cipher"] = report.cipher;
    entry["path"] = report.path;
    found.append(entry);
  }
  return found;
}

}  // namespace

void bindTransport(py::module_& m) {
  m.def("tls_library", &tcp::tlsLibrary,
        "The library that encrypts where there is a secret; empty in a build without.");
  py::class_<RelayProcess>(
      m, "Relay",
      "A relay for ranks of any group that have the secret of this process, or, where it has none, for all\n"
      "who ask; in a thread of its own, at `listen` (host:port). ValueError.")
      .def(py::init<const std::string&>(), py::arg("listen"))
      .def_property_readonly("addresses", [](const RelayProcess& relay) { return relay.endpoint.addresses(); })
      .def(
          "relayed", [](RelayProcess& relay) { return relay.endpoint.relayed(); },
          py::call_guard<py::gil_scoped_release>(), "(connections that it joins, bytes that it has passed on).");
  m.def(
      "secret_from",
      [] {
        return translated([] {
          const auto secret = tcp::Secret::fromEnvironment();
          return secret ? secret->from() : std::string();
        });
      },
      "The variable that the secret is from, LOWCOMM_SECRET or LOWCOMM_SECRET_FILE; empty without one. ValueError\n"
      "naming the variable where the secret is none.");
  m.def("connections", &connectionsOf, py::arg("backend"),
        "What the transport of a group knows of its connections, a dictionary each (lc.connections()).");
  py::class_<PortStore, c10d::TCPStore, c10::intrusive_ptr<PortStore>>(py::handle(), "PortStore");  // by these alone
  m.def("serve_store", &PortStore::serve, py::arg("timeout"), py::arg("ranks") = 0,
        py::call_guard<py::gil_scoped_release>());
  m.def("dial_store", &PortStore::dial, py::arg("address"), py::arg("timeout"),
        py::call_guard<py::gil_scoped_release>());
}

}  // namespace lowcomm
