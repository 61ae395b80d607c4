#pragma once

#include <pybind11/pybind11.h>

#include "base/error.h"

namespace lowcomm {

// What every caller's mistake becomes. A payload that does not parse is one here: no peer is involved.
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
