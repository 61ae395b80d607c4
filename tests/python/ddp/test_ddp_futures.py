"""A DDP bucket's future waits on a device for every part's stream, on a fake device that writes its orders down."""

import fake_cuda
import pytest
import torch
from torch.futures import Future

from torch_lowcomm.ddp.step import after


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


@fake_cuda.needed
@pytest.mark.on(1, start="spawn", env=fake_cuda.ENV)
def test_a_devices_streams_wait_for_every_part(r):
    device = torch.device("cuda", 0)
    result = torch.ops.aten.empty.memory_format([2], device=device)
    parts = [Future(devices=[device]), Future(devices=[device])]
    future = after(parts, lambda: None, result)
    for part in parts:
        part.set_result(result)
    before = fake_cuda.told()
    marks = [order.split()[1] for order in before if order.startswith("record")]
    first, second = marks[0], marks[1]  # of the parts
    # Both parts' streams are waited for by the stream whose end the result is.
    last = before[-1]
    assert last.startswith("record"), before
    stream, mark = last.split()[3], last.split()[1]
    for part in (first, second):
        assert f"block {stream} on {part}" in before, (part, before)
    future.wait()
    assert f"block 0:5 on {mark}" in fake_cuda.told()[len(before) :], fake_cuda.told()
