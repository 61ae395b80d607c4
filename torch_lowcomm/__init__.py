"""Training over slow links with PyTorch: a c10d backend that is exact by default and compresses where you ask for it.

import torch.distributed as dist
dist.init_process_group("lowcomm")        # exact; no import of this package is needed

import torch_lowcomm as lc
lc.fsdp.quantize(model, weights="minmax8:bucket=1024", gradients="qsgd8:bucket=1024")
lc.stats()
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from torch_lowcomm._compatibility import check_torch
from torch_lowcomm._variables import warn_of_unknown

check_torch()
warn_of_unknown(os.environ)

import _torch_lowcomm_autoload  # noqa: E402
from torch_lowcomm import _copies, ddp  # noqa: E402, F401
from torch_lowcomm._C import Options  # noqa: E402
from torch_lowcomm._version import __version__  # noqa: E402
from torch_lowcomm.codec import Codec, codec  # noqa: E402
from torch_lowcomm.groups import connections, exact, flight_record, reset_stats, set_policy, stats  # noqa: E402
from torch_lowcomm.membership import Membership  # noqa: E402
from torch_lowcomm.reduction import Residual, all_reduce  # noqa: E402
from torch_lowcomm.summary import Summary, print_at_exit, summary  # noqa: E402

if TYPE_CHECKING:
    from torch_lowcomm import diloco, fsdp, pipeline, planner, subspace
    from torch_lowcomm.diloco import DiLoCoX
    from torch_lowcomm.live.handlers import debug_handlers
    from torch_lowcomm.live.log import log_to
    from torch_lowcomm.planner import plan
    from torch_lowcomm.quantized_adam import QuantizedAdam
    from torch_lowcomm.seed_replay import SeedReplay, StoreExchange
    from torch_lowcomm.subspace.optimizer import SubspaceAdamW

print_at_exit(os.environ)
_torch_lowcomm_autoload.register_backend()  # where TORCH_DEVICE_BACKEND_AUTOLOAD=0 kept torch from doing it

# These bring DTensor, pipelining or dynamo, more than a second of imports: each comes when it is first asked for.
_LATER = {
    "DiLoCoX": "diloco",
    "QuantizedAdam": "quantized_adam",
    "SeedReplay": "seed_replay",
    "StoreExchange": "seed_replay",
    "SubspaceAdamW": "subspace.optimizer",
    "debug_handlers": "live.handlers",
    "diloco": "diloco",
    "fsdp": "fsdp",
    "log_to": "live.log",
    "pipeline": "pipeline",
    "plan": "planner",
    "planner": "planner",
    "quantized_adam": "quantized_adam",
    "seed_replay": "seed_replay",
    "subspace": "subspace",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'torch_lowcomm' has no attribute {name!r}")
    module = importlib.import_module(f"torch_lowcomm.{_LATER[name]}")
    found = module if name == _LATER[name] else getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


__all__ = [
    "Codec",
    "DiLoCoX",
    "Membership",
    "Options",
    "QuantizedAdam",
    "Residual",
    "SeedReplay",
    "StoreExchange",
    "SubspaceAdamW",
    "Summary",
    "__version__",
    "all_reduce",
    "codec",
    "connections",
    "ddp",
    "debug_handlers",
    "diloco",
    "exact",
    "flight_record",
    "fsdp",
    "log_to",
    "pipeline",
    "plan",
    "planner",
    "reset_stats",
    "set_policy",
    "stats",
    "subspace",
    "summary",
]
