"""Messages of a channel as Works of c10d: waited for, asked, with a future, and with the errors of both sides."""

import datetime

import pytest
import torch
import torch.distributed as dist

from torch_lowcomm import _C
from torch_lowcomm.groups import backend_of

ELEMENTS, SAMPLES = 96, 4


def _channel(backend, peer, number, *, codec="", memory=None):
    return _C.BoundaryChannel(
        backend,
        peer,
        number,
        dtype=torch.float32,
        codec=codec,
        first=codec,
        channels=ELEMENTS,
        memory=memory,
        edge="forward boundary 0",
        part=f"micro-batch {number}",
    )


def _works(r):
    r.init("lowcomm", timeout_s=60)
    backend, peer = backend_of(), 1 - r.rank

    def begin(channel, tensor, samples=()):
        send = r.rank == 0
        return (backend.send_message if send else backend.recv_message)(channel, tensor, samples)

    want = torch.arange(float(ELEMENTS))
    for number, wait in enumerate(("wait", "time-out", "poll", "future", "then")):
        tensor = want.clone() if r.rank == 0 else torch.zeros(ELEMENTS)
        work = begin(_channel(backend, peer, number), tensor)
        assert r.rank == 0 or work._source_rank() == peer
        if wait == "wait":
            work.wait()
        elif wait == "time-out":
            work.wait(datetime.timedelta(seconds=60))
        elif wait == "poll":
            while not work.is_completed():  # until the test's deadline
                pass
            assert work.is_success()
        elif wait == "future":
            (received,) = work.get_future().wait() if r.rank == 1 else (tensor,)
            assert received.data_ptr() == tensor.data_ptr()
            work.get_future().wait()
        else:
            assert work.get_future().then(lambda future: "then").wait() == "then"
        assert torch.equal(tensor, want), wait
    # With a memory of samples: the Work's end commits them, on both sides.
    memory = _C.SampleMemory(ELEMENTS // SAMPLES, ELEMENTS // SAMPLES, "fp16")
    channel = _channel(backend, peer, 9, codec="gauss4", memory=memory)
    for visits in (1, 2):
        work = begin(channel, torch.linspace(-1, 1, ELEMENTS), range(SAMPLES))
        assert [memory.version(sample) for sample in range(SAMPLES)] == [visits - 1] * SAMPLES
        work.get_future().wait()
        assert [memory.version(sample) for sample in range(SAMPLES)] == [visits] * SAMPLES
    tables = [None, None]
    dist.all_gather_object(tables, memory.table())
    assert tables[0] == tables[1]
    # An error is the Work's and its future's, of which the group goes on or ends as for any message of a channel.
    tensor = torch.full((ELEMENTS,), float("nan"))
    work = begin(channel, tensor, range(SAMPLES))
    with pytest.raises((ValueError, dist.DistBackendError), match="(?i)nan"):
        work.wait()
    work = begin(channel, tensor, range(SAMPLES))
    with pytest.raises((ValueError, RuntimeError), match="(?i)nan"):
        work.get_future().wait()
    assert [memory.version(sample) for sample in range(SAMPLES)] == [2] * SAMPLES
    with pytest.raises(ValueError, match="expected no samples without a memory, got 1"):
        begin(_channel(backend, peer, 10), torch.zeros(1), [3])
    with pytest.raises(TypeError, match=r"expected float32, got Int"):
        begin(_channel(backend, peer, 10), torch.zeros(1, dtype=torch.int32))
    work = begin(_channel(backend, peer, 11), torch.zeros(ELEMENTS - r.rank))
    with pytest.raises(dist.DistBackendError, match="elements differs: rank 0 has '96', rank 1 has '95'"):
        work.wait()
    dist.destroy_process_group()


def test_messages_of_a_channel_are_works(pair):
    pair(_works)
