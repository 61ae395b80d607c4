#pragma once

#include <pybind11/pybind11.h>

#include "base/error.h"

namespace lowcomm {

// One file a bound folder; module.cpp calls them in order.
void bindCodec(pybind11::module_& m);
void bindBackend(pybind11::module_& m);
void bindDiLoCoX(pybind11::module_& m);
void bindQuantizedAdam(pybind11::module_& m);
void bindSubspaceAdam(pybind11::module_& m);
void bindSeedReplay(pybind11::module_& m);
void bindPipeline(pybind11::module_& m);
void bindSubspace(pybind11::module_& m);
void bindTransport(pybind11::module_& m);

// Calls f. A caller's mistake becomes a Python error; so does a payload that does not parse, for no peer is involved.
template <typename F>
auto asPythonErrors(F&& f) {
  try {
    return f();
  } catch (const TypeError& error) {
    throw pybind11::type_error(error.what());
  } catch (const ValueError& error) {
    throw pybind11::value_error(error.what());
  } catch (const WireError& error) {
    throw pybind11::value_error(error.what());
  }
}

}  // namespace lowcomm
