#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "backend/backend_queue.h"
#include "bindings/bindings.h"
#include "bindings/option_reader.h"
#include "diloco/diloco.h"
#include "tensor/errors.h"

namespace py = pybind11;

namespace lowcomm {
namespace {

// (name, the rank's own tensor, the whole parameter's shape, where the tensor begins in it); two empty lists where the
// tensor is the whole.
using Held = std::tuple<std::string, at::Tensor, std::vector<int64_t>, std::vector<int64_t>>;
using Backend = c10::intrusive_ptr<LowcommBackend>;

std::vector<OuterParameter> parametersOf(const std::vector<Held>& held) {
  std::vector<OuterParameter> parameters;
  for (const auto& [name, tensor, whole, offset] : held)
    parameters.push_back({name, tensor, whole, offset});
  return parameters;
}

DiLoCoXOptions optionsOf(const py::dict& given) {
  DiLoCoXOptions o;
  OptionReader reader("DiLoCoX", given);
  std::string mode;
  reader.take("mode", mode);
  if (!mode.empty()) o.mode = outerMode(mode);
  reader.take("codec", o.codec);
  reader.take("projection_codec", o.projection);
  reader.take("sync_every", o.sync_every);
  reader.take("sync_seconds", o.sync_seconds);
  reader.take("quorum", o.quorum);
  reader.take("fragments", o.fragments);
  reader.take("fragment_sync_delay", o.delay);
  reader.take("fragment_update_alpha", o.alpha);
  reader.take("sync_warmup", o.sync_warmup);
  reader.take("outer_lr", o.lr);
  reader.take("outer_momentum", o.momentum);
  reader.take("error_feedback", o.error_feedback);
  reader.take("eight_bits", o.eight_bits);
  reader.take("rank", o.rank);
  reader.take("adapt_rank", o.adapt_rank);
  reader.take("adapt_sync_every", o.adapt_sync_every);
  reader.take("min_rank", o.min_rank);
  reader.take("check_every", o.check_every);
  reader.take("seed", o.seed);
  reader.expectAllTaken();
  return o;
}

std::shared_ptr<OpQueue> queueOf(const std::optional<Backend>& backend) {
  return backend ? std::make_shared<BackendQueue>(*backend) : nullptr;
}

std::vector<std::shared_ptr<OpQueue>> queuesOf(const std::vector<Backend>& backends) {
  std::vector<std::shared_ptr<OpQueue>> queues;
  for (const Backend& backend : backends)
    queues.push_back(std::make_shared<BackendQueue>(backend));
  return queues;
}

py::dict memoryOf(const OuterMemory& memory) {
  py::dict entry;
  for (const auto& [name, part] : OuterMemory::kParts)
    entry[name] = memory.*part;
  entry["total"] = memory.total();
  return entry;
}

py::dict reportOf(const OuterReport& report) {
  py::dict entry;
  entry["outer_steps"] = report.outer_steps;
  entry["participating"] = report.participating;
  entry["sync_every"] = report.sync_every;
  entry["rank"] = report.rank;
  entry["effective_rank"] = report.effective_rank;
  entry["sent_bytes"] = report.sent_bytes;
  entry["total_sent_bytes"] = report.total_sent_bytes;
  entry["taken_bytes"] = report.taken_bytes;
  entry["taken_s"] = report.taken_s;
  entry["late_samples"] = report.late_samples;
  entry["dropped_samples"] = report.dropped_samples;
  entry["stripes"] = report.stripes;
  entry["stripe_elements"] = report.stripe_elements;
  entry["waited_s"] = report.waited_s;
  entry["total_waited_s"] = report.total_waited_s;
  entry["local_s"] = report.local_s;
  entry["memory"] = memoryOf(report.memory);
  return entry;
}

}  // namespace

void bindDiLoCoX(py::module_& m) {
  using release = py::call_guard<py::gil_scoped_release>;
  py::class_<DiLoCoX>(m, "DiLoCoX")
      .def(
          py::init([](const std::vector<Held>& parameters, const std::vector<Backend>& stripes,
                      const std::optional<Backend>& site, const std::vector<int>& parts,
                      const std::vector<int>& part_stripes, const std::vector<Held>& buffers, const py::dict& options) {
            return translated([&] {
              DiLoCoXOptions parsed = optionsOf(options);
              py::gil_scoped_release released;
              return std::make_unique<DiLoCoX>(parametersOf(parameters), queuesOf(stripes), std::move(parsed),
                                               OuterSite{queueOf(site), parts, part_stripes}, parametersOf(buffers));
            });
          }),
          py::arg("parameters"), py::arg("stripes"), py::kw_only(), py::arg("site"), py::arg("parts"),
          py::arg("part_stripes"), py::arg("buffers"), py::arg("options"))
      .def(
          "step", [](DiLoCoX& d, double samples) { return translated([&] { return d.step(samples); }); },
          py::arg("samples"), release())
      .def(
          "finish", [](DiLoCoX& d, bool sends) { translated([&] { d.finish(sends); }); }, py::arg("sends") = false,
          release())
      .def(
          "quiesce", [](DiLoCoX& d) { translated([&] { d.quiesce(); }); }, release())
      .def(
          "regroup",
          [](DiLoCoX& d, const std::vector<Backend>& stripes) { translated([&] { d.regroup(queuesOf(stripes)); }); },
          py::arg("stripes"), release())
      .def(
          "restore", [](DiLoCoX& d) { translated([&] { d.restore(); }); }, release())
      .def(
          "show_outer", [](DiLoCoX& d) { translated([&] { d.showOuter(); }); }, release())
      // (piece that this rank carries, its outer value in fp32): the loop's own memory, for reading.
      .def("carried",
           [](DiLoCoX& d) {
             std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
             d.each([&](const OuterParameter& p, const at::Tensor& outer) { pairs.emplace_back(p.tensor, outer); });
             return pairs;
           })
      .def_property_readonly("report", [](const DiLoCoX& d) { return reportOf(d.report()); })
      .def_property_readonly("agreed", &DiLoCoX::agreed)
      .def_property_readonly("stripes", &DiLoCoX::stripes)
      .def_property_readonly("steps", &DiLoCoX::steps)
      .def_property_readonly("begun", [](const DiLoCoX& d) { return d.place().begun.load(); })
      .def_property_readonly("awaited", [](const DiLoCoX& d) { return d.place().awaited.load(); })
      .def(
          "state", [](DiLoCoX& d) { return translated([&] { return d.state(); }); }, release())
      .def(
          "state_failed", [](DiLoCoX& d, const std::string& error) { translated([&] { d.stateFailed(error); }); },
          py::arg("error"), release())
      .def(
          "load", [](DiLoCoX& d, const TensorMap& state) { translated([&] { d.load(state); }); }, py::arg("state"),
          release());
  m.def(
      "refuse_diloco",
      [](const std::string& error, const std::vector<Backend>& stripes, const std::optional<Backend>& site,
         const std::vector<int>& parts, const std::vector<int>& part_stripes) {
        translated([&] {
          py::gil_scoped_release released;
          DiLoCoX::refuse(error, queuesOf(stripes), OuterSite{queueOf(site), parts, part_stripes});
        });
      },
      py::arg("error"), py::kw_only(), py::arg("stripes"), py::arg("site"), py::arg("parts"), py::arg("part_stripes"));
}

}  // namespace lowcomm
