"""Training over slow links with PyTorch: a c10d backend that is exact by default and compresses where you ask for it.

import torch.distributed as dist
dist.init_process_group("lowcomm")        # exact; no import of this package is needed

import torch_lowcomm as lc
lc.fsdp.quantize(model, weights="minmax8:bucket=1024", gradients="qsgd8:bucket=1024")
lc.stats()
"""

from torch_lowcomm._compatibility import check_torch

check_torch()

import _torch_lowcomm_autoload  # noqa: E402
from torch_lowcomm import ddp, diloco, fsdp, pipeline, subspace  # noqa: E402
from torch_lowcomm._C import Options  # noqa: E402
from torch_lowcomm._version import __version__  # noqa: E402
from torch_lowcomm.codec import Codec, codec  # noqa: E402
from torch_lowcomm.diloco import DiLoCoX  # noqa: E402
from torch_lowcomm.groups import cancel, connections, exact, flight_record, reset_stats, set_policy, stats  # noqa: E402
from torch_lowcomm.membership import Membership  # noqa: E402
from torch_lowcomm.quantized_adam import QuantizedAdam  # noqa: E402
from torch_lowcomm.reduction import Residual, all_reduce  # noqa: E402
from torch_lowcomm.seed_replay import SeedReplay, StoreExchange  # noqa: E402
from torch_lowcomm.subspace.optimizer import SubspaceAdamW  # noqa: E402
from torch_lowcomm.two_level import TwoLevel  # noqa: E402

_torch_lowcomm_autoload.register_backend()  # where TORCH_DEVICE_BACKEND_AUTOLOAD=0 kept torch from doing it

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
    "TwoLevel",
    "__version__",
    "all_reduce",
    "cancel",
    "codec",
    "connections",
    "ddp",
    "diloco",
    "exact",
    "flight_record",
    "fsdp",
    "pipeline",
    "reset_stats",
    "set_policy",
    "stats",
    "subspace",
]
