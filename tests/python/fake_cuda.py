"""A CUDA of host memory that does what is enqueued when somebody waits for it, and not before (tests/cpp/fake_device.h).

Ranks get the library before torch: `run_ranks(fn, n, start="spawn", env=fake_cuda.ENV)`, and call `begin()`.
"""

import contextlib
import ctypes
from pathlib import Path

import pytest

LIBRARY = Path(__file__).parents[2] / "build" / "libfake_device.so"
ENV = {"LD_PRELOAD": str(LIBRARY)}
needed = pytest.mark.skipif(not LIBRARY.exists(), reason="the C++ tests are not built")


def begin():
    """Makes the device late, and lets torch.cuda, which a CPU build of torch leaves empty, be torch.accelerator's."""
    import torch
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    _library().fakeDeviceIsLate()
    torch.cuda._lazy_init = lambda: None
    torch.cuda.is_available = torch.cuda.is_initialized = lambda: True
    torch.cuda.device_count = lambda: 2
    torch.cuda.current_device = torch.accelerator.current_device_index
    torch.cuda.set_device = lambda device: torch.accelerator.set_device_index(torch.device(device).index)
    torch.cuda.Stream = lambda device=None, priority=0: torch.Stream(device or "cuda", priority=priority)
    torch.cuda.current_stream = torch.accelerator.current_stream
    torch.cuda.stream = lambda stream: stream or contextlib.nullcontext()
    torch.cuda.Event = lambda **_: torch.Event("cuda")
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, device=None: None
    # Storages of a device are torch's own to resize: FSDP2's full parameters stay.
    _fsdp_param.free_storage = _fsdp_param.alloc_storage = lambda tensor: None


def told():
    """What the device was told, in order, such as "record e1 on 0:5" (device:stream), "block 0:7 on e1", "run on 0:7"."""
    library = _library()
    library.fakeDeviceTold.restype = ctypes.c_char_p
    return library.fakeDeviceTold().decode().split("\n")[:-1]


def _library():
    return ctypes.CDLL(str(LIBRARY))
