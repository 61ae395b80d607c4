#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backend/backend_queue.h"
#include "base/error.h"
#include "bindings/bindings.h"
#include "pipeline/boundary_channel.h"
#include "pipeline/buffered_store.h"
#include "pipeline/file_store.h"
#include "tensor/errors.h"
#include "tensor/wire_type.h"

namespace py = pybind11;

namespace lowcomm {
namespace {

using Backend = c10::intrusive_ptr<LowcommBackend>;
using Samples = std::vector<uint64_t>;
using release = py::call_guard<py::gil_scoped_release>;

constexpr size_t kBytesWaiting = size_t{64} << 20;  // to be written to one file

void expectType(const BoundaryChannel& channel, const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(wireType(tensor.scalar_type()) == channel.dtype(), "lowcomm: a channel's tensor: expected ",
                   dtypeName(channel.dtype()), ", got ", tensor.scalar_type());
}

void expectHost(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu() && tensor.is_contiguous(),
                    "lowcomm: a channel's tensor: expected a contiguous one in host memory, got device ",
                    tensor.device(), ", shape ", tensor.sizes(), " with strides ", tensor.strides());
}

// A message and its tensor, which a receive writes until it is through.
struct BoundMessage {
  std::unique_ptr<ChannelMessage> message;
  at::Tensor tensor;
};

// The codec of a tensor whose last dimension has `channels` elements, and its units `unit`; 0: none.
CodecSpec specOf(const std::string& text, uint32_t channels, uint64_t unit) {
  if (text.empty()) return {};
  const CodecSpec parsed = CodecSpec::parse(text), spec = parsed.open() ? parsed.withChannels(channels) : parsed;
  return unit == 0 ? spec : spec.withUnit(unit);
}

}  // namespace

void bindPipeline(py::module_& m) {
  py::register_local_exception_translator([](std::exception_ptr error) {
    try {
      std::rethrow_exception(error);
    } catch (const FileError& e) {
      const py::tuple arguments = py::make_tuple(e.code, e.what(), e.path);
      PyErr_SetObject(PyExc_OSError, arguments.ptr());
    }
  });
  // (elements, channels, unit) of a slot file.
  m.def(
      "slot_file_shape",
      [](const std::string& path) {
        const SlotFileHeader header = translated([&] { return FileStore::headerOf(path); });
        return std::tuple(header.elements, header.channels,
                          translated([&] { return SlotFormat::unitOf(header.format); }));
      },
      py::arg("path"));
  m.def(
      "slot_format",
      [](uint64_t elements, uint64_t channels, const std::string& store, uint64_t unit) {
        return translated([&] { return SlotFormat::parse(store, elements, channels, unit).name(); });
      },
      py::arg("elements"), py::arg("channels"), py::arg("store"), py::arg("unit"));
  m.def(
      "check_slots", [](const std::string& store) { translated([&] { SlotFormat::check(store); }); }, py::arg("store"));

  py::class_<SampleMemory, std::shared_ptr<SampleMemory>>(m, "SampleMemory")
      // `file`: the path of a slot file, or empty for slots in RAM; `place` and `run` are its header's.
      .def(py::init([](uint64_t elements, uint64_t channels, const std::string& store, uint64_t unit,
                       const std::string& file, const std::string& place, const std::string& run,
                       std::optional<uint64_t> max_bytes) {
             return translated([&] {
               const SlotFormat format = SlotFormat::parse(store, elements, channels, unit);
               const uint64_t most = max_bytes.value_or(UINT64_MAX);
               if (file.empty()) return std::make_shared<SampleMemory>(format, most);
               const size_t slot_bytes = format.slotBytes();
               const SlotFileHeader header{elements, channels, slot_bytes, format.name(), place, run};
               const size_t most_waiting = std::max<size_t>(kBytesWaiting / slot_bytes, 1);
               return std::make_shared<SampleMemory>(
                   format,
                   std::make_unique<BufferedStore>(std::make_unique<FileStore>(file, header), slot_bytes, most_waiting,
                                                   file),
                   most);
             });
           }),
           py::arg("elements"), py::arg("channels"), py::arg("store"), py::kw_only(), py::arg("unit") = 0,
           py::arg("file") = "", py::arg("place") = "", py::arg("run") = "", py::arg("max_bytes") = py::none(),
           release())
      .def("version", &SampleMemory::version, py::arg("sample"))
      .def("forget", &SampleMemory::forget, py::arg("sample"), py::arg("why") = "")
      .def("read_ahead", &SampleMemory::readAhead, py::arg("samples"), release())
      .def("flush", &SampleMemory::flush, release())
      .def("close", &SampleMemory::close, release())
      .def_property_readonly("counts",
                             [](const SampleMemory& memory) {
                               const MemoryCounts counts = memory.counts();
                               py::dict entry;
                               entry["seen"] = counts.seen;
                               entry["first"] = counts.first;
                               entry["overflow"] = counts.overflow;
                               entry["forgotten"] = counts.forgotten;
                               entry["read_ahead"] = counts.reads.ahead;
                               entry["read_late"] = counts.reads.late;
                               return entry;
                             })
      .def_property_readonly("bytes", &SampleMemory::bytes)
      .def_property_readonly("elements", [](const SampleMemory& memory) { return memory.format().elements(); })
      .def_property_readonly("format", [](const SampleMemory& memory) { return memory.format().name(); })
      .def_property_readonly("slot_bytes", [](const SampleMemory& memory) { return memory.format().slotBytes(); })
      // Rows of (sample, version, digest).
      .def("table",
           [](const SampleMemory& memory) {
             std::vector<std::tuple<uint64_t, uint32_t, uint32_t>> rows;
             for (const SlotSummary& slot : memory.table())
               rows.emplace_back(slot.sample, slot.version, slot.digest);
             return rows;
           })
      .def(
          "read",
          [](const SampleMemory& memory, uint64_t sample) {
            at::Tensor slot = at::empty({static_cast<int64_t>(memory.format().slotBytes())}, at::kByte);
            translated([&] { memory.read(sample, memory.version(sample), static_cast<std::byte*>(slot.data_ptr())); });
            return slot;
          },
          py::arg("sample"))
      .def(
          "restore",
          [](SampleMemory& memory, uint64_t sample, uint32_t version, const at::Tensor& slot) {
            expectHost(slot);
            TORCH_CHECK_VALUE(slot.nbytes() == memory.format().slotBytes(),
                              "lowcomm: memory of samples: expected a slot of ", memory.format().slotBytes(),
                              " bytes, got ", slot.nbytes());
            translated([&] { memory.restore(sample, version, static_cast<const std::byte*>(slot.data_ptr())); });
          },
          py::arg("sample"), py::arg("version"), py::arg("slot"));

  py::class_<BoundMessage>(m, "ChannelMessage")
      .def_property_readonly("spoilt", [](const BoundMessage& bound) { return bound.message->spoilt(); })
      .def_property_readonly("name", [](const BoundMessage& bound) { return bound.message->name(); })
      // For a send: sums of |a| and of |a - m| over some elements of the samples that are sent as changes.
      .def_property_readonly("change_sums",
                             [](const BoundMessage& bound) {
                               const SampleCounters& samples = bound.message->samples();
                               return std::pair(samples.values, samples.changes);
                             })
      .def("wait", [](BoundMessage& bound) { translated([&] { bound.message->wait(); }); }, release());

  py::class_<ChannelBlock>(m, "ChannelBlock")
      .def(py::init([](const Backend& group, int peer, uint32_t number) {
             return translated(
                 [&] { return std::make_unique<ChannelBlock>(std::make_shared<BackendQueue>(group), peer, number); });
           }),
           py::arg("group"), py::arg("peer"), py::arg("number"))
      .def(
          "withdraw", [](ChannelBlock& block, const std::string& why) { translated([&] { block.withdraw(why); }); },
          py::arg("why"), release())
      .def_property_readonly("withdrawn",
                             [](const ChannelBlock& block) { return translated([&] { return block.withdrawn(); }); })
      .def("resume", [](ChannelBlock& block) { translated([&] { block.resume(); }); }, release());

  py::class_<BoundaryChannel, std::shared_ptr<BoundaryChannel>>(m, "BoundaryChannel")
      .def(py::init([](const Backend& group, int peer, uint32_t number, at::ScalarType dtype, const std::string& codec,
                       const std::string& first, uint32_t channels, std::shared_ptr<SampleMemory> memory,
                       const std::string& edge, const std::string& part, const std::optional<std::string>& overflow,
                       const std::string& gradient, const std::array<uint64_t, 3>& units) {
             return translated([&] {
               ChannelOptions options{wireType(dtype),
                                      {specOf(codec, channels, units[0]), specOf(first, channels, units[1])},
                                      group->parts().draws.key(),
                                      edge,
                                      part,
                                      gradient};
               if (overflow) options.codecs.overflow = specOf(*overflow, channels, units[2]);
               return std::make_shared<BoundaryChannel>(std::make_shared<BackendQueue>(group), peer, number,
                                                        std::move(options), std::move(memory));
             });
           }),
           py::arg("group"), py::arg("peer"), py::arg("number"), py::kw_only(), py::arg("dtype"), py::arg("codec"),
           py::arg("first"), py::arg("channels"), py::arg("memory"), py::arg("edge"), py::arg("part"),
           py::arg("overflow") = py::none(), py::arg("gradient") = "", py::arg("units") = std::array<uint64_t, 3>{})
      .def(
          "send",
          [](BoundaryChannel& channel, const at::Tensor& tensor, Samples samples) {
            expectHost(tensor);
            expectType(channel, tensor);
            const WireElements elements(tensor);
            return translated([&] {
              return BoundMessage{channel.send(tensor.const_data_ptr(), elements.count, std::move(samples)), tensor};
            });
          },
          py::arg("tensor"), py::arg("samples"), release())
      .def(
          "recv",
          [](BoundaryChannel& channel, const at::Tensor& tensor, Samples samples) {
            expectHost(tensor);
            expectType(channel, tensor);
            const WireElements elements(tensor);
            return translated([&] {
              return BoundMessage{channel.recv(tensor.data_ptr(), elements.count, std::move(samples)), tensor};
            });
          },
          py::arg("tensor"), py::arg("samples"), release());
}

}  // namespace lowcomm
