#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "base/hashes.h"
#include "bindings/bindings.h"
#include "bindings/option_reader.h"
#include "seed_replay/seed_replay.h"
#include "tensor/errors.h"

namespace py = pybind11;

namespace lowcomm {
namespace {

using NamedParameters =
    std::vector<std::tuple<std::string, at::Tensor, bool, uint64_t>>;  // name, tensor, decayed, first element
using WholeShapes = std::optional<std::vector<std::vector<int64_t>>>;

std::span<const std::byte> spanOf(std::string_view bytes) {
  return std::as_bytes(std::span(bytes.data(), bytes.size()));
}

py::bytes bytesOf(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

SeedReplayOptions optionsOf(const py::dict& given) {
  SeedReplayOptions options;
  OptionReader reader("SeedReplay", given);
  std::string noise = "gaussian", scale = "sqrt";
  reader.take("noise", noise);
  if (noise != "gaussian" && noise != "rademacher") {
    throw ValueError("SeedReplay: noise: expected rademacher or gaussian, got '" + noise + "'");
  }
  options.noise = noise == "gaussian" ? Noise::gaussian : Noise::rademacher;
  reader.take("lr_scale", scale);
  if (scale != "sqrt" && scale != "mean") {
    throw ValueError("SeedReplay: lr_scale: expected sqrt or mean, got '" + scale + "'");
  }
  options.mean = scale == "mean";
  reader.take("codec", options.codec);
  reader.take("seed", options.seed);
  reader.take("pool", options.pool);
  reader.take("base", options.base);
  reader.take("agreed", options.agreed);
  reader.expectAllTaken();
  return options;
}

std::unique_ptr<SeedReplay> make(const NamedParameters& parameters, const py::dict& given, const WholeShapes& wholes) {
  return asPythonErrors([&] {
    SeedReplayOptions options = optionsOf(given);
    std::vector<ReplayParameter> list;
    for (const auto& [name, tensor, decayed, first] : parameters)
      list.push_back({name, tensor, decayed, first});
    if (wholes && wholes->size() != list.size()) {
      throw ValueError("SeedReplay: shapes: expected one a parameter, " + std::to_string(list.size()) + ", got " +
                       std::to_string(wholes->size()));
    }
    for (size_t i = 0; wholes && i < list.size(); ++i)
      list[i].whole = (*wholes)[i];
    py::gil_scoped_release released;
    return std::make_unique<SeedReplay>(std::move(list), std::move(options));
  });
}

std::vector<std::vector<std::byte>> listOf(const std::vector<std::string>& messages) {
  std::vector<std::vector<std::byte>> list;
  for (const std::string& message : messages) {
    const auto bytes = spanOf(message);
    list.emplace_back(bytes.begin(), bytes.end());
  }
  return list;
}

struct LogBytes {
  py::bytes log;
  ReplayRecords records() const { return ReplayRecords(spanOf(log)); }
};

py::dict entryOf(const ReplayRecord& record) {
  std::vector<uint64_t> machines;
  std::vector<uint16_t> counts;
  std::vector<size_t> payload;
  for (const auto& entry : record.entries) {
    machines.push_back(entry.machine);
    counts.push_back(entry.count);
    payload.push_back(entry.payload.size());
  }
  py::dict out;
  out["iteration"] = record.iteration;
  out["lr"] = record.lr;
  out["weight_decay"] = record.weight_decay;
  out["machines"] = machines;
  out["counts"] = counts;
  out["payload_bytes"] = payload;
  out["bytes"] = bytesOf(writeReplayRecord(record));
  return out;
}

}  // namespace

void bindSeedReplay(py::module_& m) {
  using release = py::call_guard<py::gil_scoped_release>;
  py::class_<SeedReplay>(m, "SeedReplay")
      .def(py::init(&make), py::arg("parameters"), py::arg("options"), py::arg("shapes") = py::none())
      .def_property("iteration", &SeedReplay::iteration, &SeedReplay::setIteration)
      .def_property_readonly("description", &SeedReplay::description)
      .def_property_readonly("agreement", &SeedReplay::agreement)
      .def(
          "perturbed",
          [](const SeedReplay& s, size_t parameter, uint64_t machine, uint64_t sample, float factor) {
            return asPythonErrors([&] {
              py::gil_scoped_release released;
              return s.perturbed(parameter, machine, sample, factor);
            });
          },
          py::arg("parameter"), py::arg("machine"), py::arg("sample"), py::arg("factor"))
      .def(
          "perturb",
          [](SeedReplay& s, uint64_t machine, uint64_t sample, float factor) {
            asPythonErrors([&] {
              py::gil_scoped_release released;
              s.perturb(machine, sample, factor);
            });
          },
          py::arg("machine"), py::arg("sample"), py::arg("factor"))
      .def(
          "message",
          [](const SeedReplay& s, uint64_t machine, const std::vector<float>& estimates) {
            return asPythonErrors([&] { return bytesOf(s.message(machine, estimates)); });
          },
          py::arg("machine"), py::arg("estimates"))
      .def(
          "record",
          [](const SeedReplay& s, const std::vector<std::string>& messages, float lr, float weight_decay) {
            return asPythonErrors([&] { return bytesOf(s.record(listOf(messages), lr, weight_decay)); });
          },
          py::arg("messages"), py::kw_only(), py::arg("lr"), py::arg("weight_decay"))
      .def(
          "check_message",
          [](const SeedReplay& s, const py::bytes& message, uint64_t machine) {
            asPythonErrors([&] { s.checkMessage(machine, spanOf(message)); });
          },
          py::arg("message"), py::kw_only(), py::arg("machine"))
      .def(
          "check_rates",
          [](const SeedReplay& s, float lr, float weight_decay) {
            asPythonErrors([&] { s.checkRates(lr, weight_decay); });
          },
          py::kw_only(), py::arg("lr"), py::arg("weight_decay"))
      .def(
          "apply",
          [](SeedReplay& s, const py::bytes& records) {
            return asPythonErrors([&] {
              const auto bytes = spanOf(records);
              py::gil_scoped_release released;
              return s.apply(bytes);
            });
          },
          py::arg("records"))
      .def_property_readonly("log", [](const SeedReplay& s) { return bytesOf(s.log()); })
      .def(
          "log_from", [](const SeedReplay& s, uint64_t first) { return bytesOf(s.logFrom(first)); }, py::arg("first"))
      .def("forget_log", &SeedReplay::forgetLog, py::kw_only(), py::arg("before"))
      .def("checksum", &SeedReplay::checksum, release())
      .def("checksums",
           [](const SeedReplay& s) {
             return asPythonErrors([&] {
               py::gil_scoped_release released;
               return s.checksums();
             });
           })
      .def_property("sums", &SeedReplay::sums, [](SeedReplay& s, std::vector<float> sums) {
        asPythonErrors([&] { s.setSums(std::move(sums)); });
      });
  // Holds the log's bytes, of which a ReplayRecords is a view.
  py::class_<LogBytes>(m, "ReplayRecords")
      .def(py::init<py::bytes>(), py::arg("log"))
      .def_property_readonly(
          "first_iteration",
          [](const LogBytes& held) { return asPythonErrors([&] { return held.records().firstIteration(); }); })
      .def(
          "skip",
          [](const LogBytes& held, uint64_t count) {
            return asPythonErrors([&] { return bytesOf(held.records().skip(count)); });
          },
          py::arg("count"))
      .def_property_readonly("whole_prefix",
                             [](const LogBytes& held) { return bytesOf(held.records().wholePrefix()); });
  m.def(
      "crc32c",
      [](const at::Tensor& bytes, uint32_t before) {
        return crc32c(bytes.const_data_ptr<uint8_t>(), bytes.numel(), before);
      },
      py::arg("bytes"), py::arg("before") = 0, py::call_guard<py::gil_scoped_release>(),
      "CRC-32C of a contiguous tensor of uint8 on the host, behind what `before` is that of.");
  m.def("joined_crc32c", &joinedCrc32c, py::arg("first"), py::arg("second"), py::arg("second_bytes"));
  m.def(
      "read_replay_records",
      [](const py::bytes& log) {
        return asPythonErrors([&] {
          std::vector<py::dict> records;
          for (const ReplayRecord& record : ReplayRecords(spanOf(log)).read())
            records.push_back(entryOf(record));
          return records;
        });
      },
      py::arg("log"));
}

}  // namespace lowcomm
