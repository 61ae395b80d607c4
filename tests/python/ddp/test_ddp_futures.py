"""A DDP bucket's future waits on a device for every part's stream, on a fake device that writes its orders down."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.futures import Future

from torch_lowcomm.ddp.step import after

FAKE = Path(__file__).parents[3] / "build" / "libfake_device.so"


def test_the_result_comes_after_all_and_after_what_runs():
    parts = [Future(), Future()]
    ran = []
    result = torch.zeros(1)
    future = after(parts, lambda: ran.append(1), result)
    parts[1].set_result(None)
    assert not ran
    parts[0].set_result(None)
    assert future.wait() is result
    assert ran == [1]


def _fails():
    raise ConnectionError("lost")


def test_it_fails_with_a_part_and_with_what_runs():
    first = Future()
    failed = first.then(lambda _: _fails())
    future = after([failed, Future()], lambda: pytest.fail("it ran"), torch.zeros(1))
    first.set_result(None)
    with pytest.raises(RuntimeError, match="ConnectionError: lost"):
        future.wait()
    first = Future()
    future = after([first], _fails, torch.zeros(1))
    first.set_result(None)
    with pytest.raises(RuntimeError, match="ConnectionError: lost"):
        future.wait()


def on_a_fake_device():
    """In a process of its own: what `after` has a device do."""
    library = ctypes.CDLL(str(FAKE))
    library.fakeDeviceTold.restype = ctypes.c_char_p

    def told():
        return library.fakeDeviceTold().decode().split("\n")[:-1]

    device = torch.device("cuda", 0)
    result = torch.ops.aten.empty.memory_format([2], device=device)
    parts = [Future(devices=[device]), Future(devices=[device])]
    future = after(parts, lambda: None, result)
    for part in parts:
        part.set_result(result)
    before = told()
    marks = [order.split()[1] for order in before if order.startswith("record")]
    first, second = marks[0], marks[1]  # of the parts
    # Both parts' streams are waited for by the stream whose end the result is.
    last = before[-1]
    assert last.startswith("record"), before
    stream, mark = last.split()[3], last.split()[1]
    for part in (first, second):
        assert f"block {stream} on {part}" in before, (part, before)
    future.wait()
    assert told()[-1] == f"block 0:5 on {mark}", told()


@pytest.mark.skipif(not FAKE.exists(), reason="the C++ tests are not built")
def test_a_devices_streams_wait_for_every_part():
    command = [sys.executable, "-c", "import test_ddp_futures as t; t.on_a_fake_device()"]
    ran = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
