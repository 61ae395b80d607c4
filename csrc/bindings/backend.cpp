#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "backend/backend.h"
#include "backend/codec_chooser.h"
#include "backend/collectives.h"
#include "base/signals.h"
#include "bindings/bindings.h"
#include "collective/all_reduce.h"
#include "kernels/isa/table.h"
#include "tensor/compression.h"
#include "tensor/errors.h"
#include "tensor/python_state.h"
#include "wire/frame.h"

namespace py = pybind11;

namespace lowcomm {
namespace {

using LayoutEntries = std::vector<std::tuple<uint64_t, uint64_t, std::string>>;
template <class T>
using Ptr = c10::intrusive_ptr<T>;

void releaseAround(const std::function<void()>& wait) {
  std::optional<py::gil_scoped_release> released;
  if (Py_IsInitialized() && PyGILState_Check()) released.emplace();
  try {
    wait();
  } catch (const SignalError& raised) {
    std::rethrow_exception(raised.error);
  }
}

std::optional<SignalError> runSignalHandlers() {
  if (!Py_IsInitialized()) return {};
  py::gil_scoped_acquire locked;
  if (PyErr_CheckSignals() == 0) return {};
  const py::error_already_set raised;
  return SignalError{std::make_exception_ptr(raised), py::str(raised.type().attr("__name__"))};
}

bool askCapturing() {
  py::gil_scoped_acquire locked;
  return py::module_::import("torch.cuda").attr("is_current_stream_capturing")().cast<bool>();
}

// A Python function that may be called, and dropped, without the interpreter's lock; at exit it is leaked on purpose.
std::shared_ptr<py::object> held(py::object function) {
  return {new py::object(std::move(function)), [](py::object* object) {
            if (!Py_IsInitialized()) return;
            py::gil_scoped_acquire locked;
            delete object;
          }};
}

MakeNccl makerOf(py::object make_nccl) {
  return [nccl = held(std::move(make_nccl))](const StorePtr& store, int rank, int size, const Ptr<Options>& options) {
    py::gil_scoped_acquire locked;
    py::object backend = (*nccl)(store, rank, size, options);
    return backend.is_none() ? BackendPtr() : backend.cast<BackendPtr>();
  };
}

using LevelTables = std::vector<std::optional<LevelTable>>;

Layout layoutOf(const LayoutEntries& entries, const std::optional<LevelTables>& tables) {
  if (tables && tables->size() != entries.size()) {
    throw ValueError("layout: expected a level table or None for each of " + std::to_string(entries.size()) +
                     " segments, got " + std::to_string(tables->size()));
  }
  std::vector<Segment> segments;
  for (const auto& [first, count, codec] : entries) {
    const CodecSpec spec = CodecSpec::parse(codec);
    const auto table = tables ? (*tables)[segments.size()] : std::nullopt;
    if (needsTable(spec) && !table) {
      throw ValueError("layout: expected codecs that need no level table, got '" + spec.str() + "' without one");
    }
    segments.push_back({first, count, spec, table});
  }
  return Layout(std::move(segments));
}

// None of an op that has sent no samples.
py::object samplesOf(const OpStats& stats) {
  const SampleCounters& samples = stats.samples;
  if (samples.seen + samples.first + samples.overflow == 0 && stats.forgotten.empty()) return py::none();
  const auto mean = [&](double sum) {
    return samples.measured > 0 ? py::object(py::float_(sum / static_cast<double>(samples.measured))) : py::none();
  };
  py::dict entry;
  entry["seen"] = samples.seen;
  entry["first"] = samples.first;
  entry["overflow"] = samples.overflow;
  entry["forgotten"] = stats.forgotten;
  entry["mean_value"] = mean(samples.values);
  entry["mean_change"] = mean(samples.changes);
  return entry;
}

// By op; `this_rank` is not among the peers.
py::dict dictOf(const std::map<std::string, OpStats>& all, int this_rank) {
  py::dict ops;
  for (const auto& [op, s] : all) {
    py::dict entry;
    entry["calls"] = s.calls;
    entry["exact_calls"] = s.exact_calls;
    entry["exact_because"] = s.exact_because;
    entry["without_units"] = s.without_units;
    entry["staged_calls"] = s.staged_calls;
    entry["unstaged_because"] = s.unstaged_because;
    entry["device_to_host_bytes"] = s.device_to_host_bytes;
    entry["host_to_device_bytes"] = s.host_to_device_bytes;
    entry["raw_bytes"] = s.raw_bytes;
    entry["wire_bytes"] = s.counted ? py::object(py::int_(s.wire_bytes)) : py::none();
    const auto own = static_cast<double>(s.raw_bytes - s.inner_bytes);
    entry["inner_bytes"] = s.inner_bytes;
    entry["ratio"] = s.counted && s.wire_bytes > 0 && own > 0
                         ? py::object(py::float_(own / static_cast<double>(s.wire_bytes)))
                         : py::none();
    entry["encode_s"] = s.encode_s;
    entry["wait_s"] = s.wait_s;
    entry["decode_s"] = s.decode_s;
    py::dict waits;
    for (size_t rank = 0; rank < s.wait_by_peer_s.size(); ++rank) {
      if (static_cast<int>(rank) != this_rank) waits[py::int_(rank)] = s.wait_by_peer_s[rank];
    }
    entry["wait_by_peer"] = waits;
    entry["straggler"] = s.straggler();
    entry["relative_error"] = s.relativeError();
    entry["samples"] = samplesOf(s);
    ops[py::str(op)] = entry;
  }
  return ops;
}

}  // namespace

void bindBackend(py::module_& m) {
  blocking_guard = &releaseAround;
  installSignalHandlers(&runSignalHandlers);
  setAskCapturing(&askCapturing);
  m.attr("WIRE_VERSION") = kWireVersion;
  m.def(
      "kernels", [] { return translated([] { return std::string(kernelsName()); }); },
      "Name of the kernel form in use: scalar, avx2, avx512 or neon. ValueError when LOWCOMM_KERNELS asks for one "
      "there "
      "is not.");
  m.def("in_exact", &ExactScope::active);
  py::class_<ExactScope>(m, "ExactScope")
      .def(py::init<>())
      .def("enter", &ExactScope::enter)
      .def("leave", &ExactScope::leave);

  py::class_<Options, c10d::Backend::Options, Ptr<Options>>(
      m, "Options",
      "What a group runs with, passed as `pg_options`. A field left None is the living default group's, or\n"
      "that of the group that is split; the default group's is filled from the environment, then from the default:\n"
      "policy (LOWCOMM_POLICY, \"\": exact), min_bytes (LOWCOMM_MIN_BYTES, 65536: an op to which a rank contributes\n"
      "fewer bytes stays exact), seed of stochastic rounding (LOWCOMM_SEED, 0), chunk_bytes of payload\n"
      "a frame (LOWCOMM_CHUNK_BYTES, 262144), connections to every peer for bulk data (LOWCOMM_CONNECTIONS; 1, or\n"
      "16 to a far peer where one TCP stream does not fill the link),\n"
      "flight_record (LOWCOMM_FLIGHT_RECORD, 64: the last ops that\n"
      "`flight_record()` shows; 0: none), encode_on_device (LOWCOMM_ENCODE_ON_DEVICE, 0; 1: CUDA tensors that are "
      "coded are coded where\n"
      "they are), nccl (LOWCOMM_NCCL, 0: exact CUDA tensors go through host memory; True or 1: NCCL carries them, and\n"
      "a group without NCCL is not made),\n"
      "timeout (init_process_group's). Frozen. Every rank of a group must give the same, except for\n"
      "flight_record and encode_on_device. Raises ValueError naming the field, what is expected and what it got.")
      .def(py::init([](std::optional<std::string> policy, std::optional<int64_t> min_bytes,
                       std::optional<std::chrono::milliseconds> timeout, std::optional<int64_t> seed,
                       std::optional<int64_t> chunk_bytes, std::optional<int64_t> connections,
                       std::optional<int64_t> flight_record, std::optional<bool> encode_on_device,
                       std::optional<bool> nccl) {
             auto options = c10::make_intrusive<Options>();
             options->policy = std::move(policy);
             options->min_bytes = min_bytes;
             options->seed = seed;
             options->chunk_bytes = chunk_bytes;
             options->connections = connections;
             options->flight_record = flight_record;
             options->encode_on_device = encode_on_device;
             options->nccl = nccl;
             if (timeout) {
               options->timeout = *timeout;
               options->timeout_set = true;
             }
             translated([&] { options->check(); });
             return options;
           }),
           py::arg("policy") = py::none(), py::kw_only(), py::arg("min_bytes") = py::none(),
           py::arg("timeout") = py::none(), py::arg("seed") = py::none(), py::arg("chunk_bytes") = py::none(),
           py::arg("connections") = py::none(), py::arg("flight_record") = py::none(),
           py::arg("encode_on_device") = py::none(), py::arg("nccl") = py::none())
      .def_property_readonly("policy", [](const Options& o) { return o.policy; })
      .def_property_readonly("min_bytes", [](const Options& o) { return o.min_bytes; })
      .def_property_readonly("seed", [](const Options& o) { return o.seed; })
      .def_property_readonly("chunk_bytes", [](const Options& o) { return o.chunk_bytes; })
      .def_property_readonly("connections", [](const Options& o) { return o.connections; })
      .def_property_readonly("flight_record", [](const Options& o) { return o.flight_record; })
      .def_property_readonly("encode_on_device", [](const Options& o) { return o.encode_on_device; })
      .def_property_readonly("nccl", [](const Options& o) { return o.nccl; })
      .def_property_readonly("timeout",
                             [](const Options& o) { return o.timeout_set ? std::optional(o.timeout) : std::nullopt; })
      // c10d sets the time-out of the options it hands out (its _timeout), and copies them.
      .def_property(
          "_timeout", [](const Options& o) { return o.timeout; },
          [](Options& o, std::chrono::milliseconds timeout) { o.timeout = timeout; })
      .def_property(
          "_name", [](const Options& o) { return o.name; }, [](Options& o, const std::string& name) { o.name = name; })
      .def("__copy__", [](const Options& o) { return c10::make_intrusive<Options>(o); })
      .def("__deepcopy__", [](const Options& o, const py::dict&) { return c10::make_intrusive<Options>(o); })
      .def("__repr__", &Options::repr);

  py::class_<Layout, std::shared_ptr<Layout>>(m, "Layout")
      .def(py::init([](const LayoutEntries& entries, const std::optional<LevelTables>& tables) {
             return translated([&] { return std::make_shared<Layout>(layoutOf(entries, tables)); });
           }),
           py::arg("segments"), py::arg("tables") = py::none())
      .def_property_readonly("elements", &Layout::elements)
      .def_property_readonly("hash", &Layout::hash)
      .def("__len__", [](const Layout& layout) { return layout.segments().size(); })
      .def("__str__", &Layout::text);

  py::class_<Residual, std::shared_ptr<Residual>>(m, "Residual")
      .def(py::init([](const std::vector<int64_t>& shape) { return std::make_shared<Residual>(shape); }),
           py::arg("shape"))
      .def_property_readonly("value", &Residual::value)
      .def("set", &Residual::set, py::arg("value"));

  py::class_<Compression, std::shared_ptr<Compression>>(m, "Compression")
      .def(py::init([](const std::vector<int64_t>& shape, int64_t rank, bool feedback, bool eight_bits, uint64_t seed) {
             return translated([&] { return std::make_shared<Compression>(shape, rank, feedback, eight_bits, seed); });
           }),
           py::arg("shape"), py::kw_only(), py::arg("rank"), py::arg("feedback"), py::arg("eight_bits"),
           py::arg("seed"))
      .def_property_readonly("residual",
                             [](const Compression& c) {
                               const at::Tensor residual = c.residual();
                               return residual.defined() ? std::optional(residual) : std::nullopt;
                             })
      .def_property_readonly("factor",
                             [](const Compression& c) {
                               const at::Tensor factor = c.factor();
                               return factor.defined() ? std::optional(factor) : std::nullopt;
                             })
      .def_property_readonly("rank", &Compression::rank)
      .def("set", &Compression::set, py::arg("residual"), py::arg("factor"))
      .def("scale", &Compression::scale, py::arg("factor"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("done", &Compression::done)
      .def("commit", &Compression::commit)
      .def("roll_back", &Compression::rollBack);
  m.def(
      "is_low_rank", [](uint64_t rows, uint64_t columns, uint64_t rank) { return isLowRank(rows, columns, rank); },
      py::arg("rows"), py::arg("columns"), py::arg("rank"));

  py::class_<LowcommBackend, c10d::Backend, Ptr<LowcommBackend>>(m, "LowcommBackend")
      .def_property_readonly(
          "options",
          [](LowcommBackend& b) { return c10::static_intrusive_pointer_cast<Options>(b.getBackendOptions()); })
      .def_property_readonly("hosts", [](const LowcommBackend& b) { return b.group().hosts; })
      .def_property_readonly("group_name", [](const LowcommBackend& b) { return b.group().name(); })
      .def_property_readonly("policy", [](const LowcommBackend& b) { return b.group().settings().policy.str(); })
      .def_property_readonly("min_bytes", [](const LowcommBackend& b) { return b.group().settings().min_bytes; })
      .def("stats", [](const LowcommBackend& b) { return dictOf(b.group().stats.snapshot(), b.getRank()); })
      .def("flight_record", &LowcommBackend::flightRecord)
      .def("reset_stats", [](LowcommBackend& b) { b.parts().group.stats.reset(); })
      .def(
          "count_forgotten",
          [](LowcommBackend& b, const std::string& op, const std::string& why, uint64_t samples) {
            b.parts().group.stats.forgot(op, why, samples);
          },
          py::arg("op"), py::arg("why"), py::arg("samples"))
      .def(
          "set_policy", [](LowcommBackend& b, const std::string& policy) { setPolicy(b.parts(), policy); },
          py::arg("policy"), py::call_guard<py::gil_scoped_release>())
      .def(
          "agree_layouts",
          [](LowcommBackend& b, const std::vector<std::pair<std::string, std::shared_ptr<Layout>>>& layouts,
             const std::string& error) {
            std::vector<std::pair<std::string, Layout>> named;
            for (const auto& [name, layout] : layouts)
              named.emplace_back(name, *layout);
            agreeOnLayouts(b.parts(), named, error);
          },
          py::arg("layouts"), py::arg("error") = "", py::call_guard<py::gil_scoped_release>())
      .def(
          "agree_on_texts",
          [](LowcommBackend& b, const std::string& what, std::vector<std::pair<std::string, std::string>> fields,
             const std::string& error) { agreeOnTexts(b.parts(), what, std::move(fields), error); },
          py::arg("what"), py::arg("fields"), py::arg("error") = "", py::call_guard<py::gil_scoped_release>())
      .def(
          "all_reduce_coded",
          [](LowcommBackend& b, const at::Tensor& tensor, const c10d::ReduceOp& op, const std::string& codec,
             std::shared_ptr<Residual> residual) {
            return translated(
                [&] { return b.allReduceCoded(tensor, op, CodecSpec::parse(codec), std::move(residual)); });
          },
          py::arg("tensor"), py::arg("op"), py::arg("codec"), py::arg("residual") = nullptr,
          py::call_guard<py::gil_scoped_release>())
      .def(
          "all_reduce_low_rank",
          [](LowcommBackend& b, const std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op,
             const std::string& codec, const std::string& projection,
             const std::vector<std::shared_ptr<Compression>>& states, const std::vector<uint64_t>& slots,
             const std::vector<uint32_t>& owners, uint32_t step) {
            return translated([&] {
              return b.allReduceLowRank(tensors, op, CodecSpec::parse(codec), CodecSpec::parse(projection), states,
                                        slots, owners, step);
            });
          },
          py::arg("tensors"), py::arg("op"), py::arg("codec"), py::arg("projection"), py::arg("states"), py::kw_only(),
          py::arg("slots"), py::arg("owners"), py::arg("step"), py::call_guard<py::gil_scoped_release>())
      .def(
          "reserve_slots", [](LowcommBackend& b, uint64_t count) { return b.parts().draws.reserveSlots(count); },
          py::arg("count"))
      .def(
          "note_exact",
          [](LowcommBackend& b, const std::string& op, const std::string& because) {
            b.parts().group.noteExact(op, because);
          },
          py::arg("op"), py::arg("because"))
      .def_property_readonly("draw_key", [](LowcommBackend& b) { return b.parts().draws.key(); })
      .def(
          "all_gather_layout",
          [](LowcommBackend& b, const at::Tensor& output, const at::Tensor& input, const Layout& layout, uint64_t slot,
             uint32_t step) { return b.allGatherLayout(output, input, layout, {slot, step}); },
          py::arg("output"), py::arg("input"), py::arg("layout"), py::kw_only(), py::arg("slot"), py::arg("step"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "reduce_scatter_layout",
          [](LowcommBackend& b, const at::Tensor& output, const at::Tensor& input, const Layout& layout,
             const c10d::ReduceOp& op, uint64_t slot,
             uint32_t step) { return b.reduceScatterLayout(output, input, layout, op, {slot, step}); },
          py::arg("output"), py::arg("input"), py::arg("layout"), py::arg("op"), py::kw_only(), py::arg("slot"),
          py::arg("step"), py::call_guard<py::gil_scoped_release>());

  m.def(
      "create_backend",
      [](const StorePtr& store, int rank, int size, const Options& given, std::chrono::milliseconds timeout,
         const std::string& group_name, const std::vector<uint64_t>& global_ranks, py::object make_nccl,
         const Ptr<LowcommBackend>& parent) {
        // The same object reaches every group that is made with it: copied before a field is written.
        auto options = c10::make_intrusive<Options>(given);
        if (parent) options->inherit(parent->group().settings());
        if (!options->timeout_set) options->timeout = timeout;
        options->group_name = group_name;
        options->global_ranks_in_group = global_ranks;
        MakeNccl make = makerOf(std::move(make_nccl));
        py::gil_scoped_release released;
        return LowcommBackend::create(store, rank, size, std::move(options), std::move(make));
      },
      py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"), py::arg("timeout"), py::arg("group_name"),
      py::arg("global_ranks"), py::arg("make_nccl"), py::arg("parent") = nullptr);
  m.def("find_backend", &findBackend, py::arg("group_name"));
  m.def("process_stats", [] { return dictOf(processStats(), -1); });
  m.def("forget_past_stats", &forgetPastStats);
  m.def("backend_names", &backendNames);
  py::module_::import("atexit").attr("register")(py::cpp_function([] { settleBackends(std::chrono::seconds(1)); }));
}

}  // namespace lowcomm
