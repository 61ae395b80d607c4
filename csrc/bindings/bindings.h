#pragma once

#include <pybind11/pybind11.h>

namespace lowcomm {

// One file a bound folder; module.cpp calls them in order.
void bindCodec(pybind11::module_& m);
void bindLevels(pybind11::module_& m);
void bindBackend(pybind11::module_& m);
void bindDiLoCoX(pybind11::module_& m);
void bindSeedReplay(pybind11::module_& m);
void bindPipeline(pybind11::module_& m);

}  // namespace lowcomm
