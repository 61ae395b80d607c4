#include <torch/version.h>

#include "bindings/bindings.h"

PYBIND11_MODULE(_C, m) {
  pybind11::module_::import("torch._C._distributed_c10d");  // bases and argument types of what is bound below
  m.attr("TORCH_VERSION") = TORCH_VERSION;
  lowcomm::bindCodec(m);
  lowcomm::bindBackend(m);
  lowcomm::bindDiLoCoX(m);
  lowcomm::bindQuantizedAdam(m);
  lowcomm::bindSubspaceAdam(m);
  lowcomm::bindSeedReplay(m);
  lowcomm::bindPipeline(m);
  lowcomm::bindSubspace(m);
  lowcomm::bindTransport(m);
}
