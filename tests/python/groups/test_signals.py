"""A signal during a wait: its handler runs at once, and what it raises ends the wait and the group, on both ranks."""

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_lowcomm as lc

DEADLINE_S = 60.0  # the harness's, which finds a wait that goes on
NEVER_S = 60 * DEADLINE_S
HOUR = timedelta(hours=1)
POLICY = "all_reduce=minmax8"


def _edge(r):
    edge = lc.pipeline.Edge(1 - r.rank, forward="gauss4")
    return lambda x: edge.recv(torch.empty(4, 512))


def _outer_step(r):
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    model(torch.ones(1, 64)).sum().backward()
    optimizer = lc.DiLoCoX(torch.optim.SGD(model.parameters(), lr=0.1), 1, mode="sync", codec="gauss4")
    return lambda x: optimizer.step()


# Of rank 0; rank 1 takes part in none of them. Each waits for rank 1.
WAITS = {
    "all_reduce, exact": lambda x: dist.all_reduce(x),
    "all_reduce, coded": lambda x: dist.all_reduce(x.repeat(1000)),
    "all_gather": lambda x: dist.all_gather([torch.empty_like(x) for _ in range(2)], x),
    "wait with a time-out": lambda x: dist.all_reduce(x, async_op=True).wait(HOUR),
    "recv": lambda x: dist.recv(x, 1),
    "recv from any rank": lambda x: dist.recv(x),
    "irecv": lambda x: dist.irecv(x, 1).wait(),
    "barrier": lambda x: dist.barrier(),
    "an op behind another": lambda x: [w.wait() for w in [dist.irecv(x, 1, tag=1), dist.irecv(x, 1, tag=2)]],
}
MADE = {"an edge of a pipeline": _edge, "an outer step": _outer_step}  # by what both ranks make before


def _waits():
    """Whether an op of this process waits for its peer."""
    return any(op["state"] == "under way" for record in lc.flight_record().values() for op in record["ops"])


def _once_it_waits(number):
    """Sends this process a signal when it waits, from another thread."""

    def send():
        while not _waits():
            time.sleep(0.01)
        time.sleep(0.3)  # it is queued before it waits; earlier is right, too, but says less
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()


@pytest.mark.later
@pytest.mark.parametrize("name", [*WAITS, *MADE])
@pytest.mark.on(2, timeout=DEADLINE_S)
def test_ctrl_c_ends_a_wait_and_tells_the_peer(r, name):
    r.init(timeout_s=NEVER_S, pg_options=lc.Options(policy=POLICY, min_bytes=1000))
    x = torch.ones(100)
    dist.all_reduce(x)
    wait = MADE[name](r) if name in MADE else WAITS[name]
    store = dist.distributed_c10d._get_default_store()
    if r.rank == 1:
        store.wait(["interrupted"], HOUR)
        with pytest.raises(dist.DistBackendError, match="(?s)rank 0.*KeyboardInterrupt|KeyboardInterrupt.*rank 0"):
            # Over lowcomm's own lanes; an outer step has a group of its own.
            wait(x) if name == "an outer step" else dist.all_reduce(torch.ones(100_000))
        store.set("seen", "")
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _once_it_waits(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        wait(x)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    store.set("interrupted", "")
    store.wait(["seen"])
    with pytest.raises(dist.DistBackendError, match="KeyboardInterrupt"):
        wait(x)


@pytest.mark.later
@pytest.mark.parametrize("kind", ["exact", "coded", "recv"])
@pytest.mark.on(2, timeout=DEADLINE_S)
def test_a_handler_that_raises_nothing_runs_while_the_wait_goes_on(r, kind):
    r.init(timeout_s=NEVER_S, pg_options=lc.Options(policy=POLICY, min_bytes=1000))
    store = dist.distributed_c10d._get_default_store()
    x = torch.ones(100_000 if kind == "coded" else 100)
    came = []
    if r.rank == 0:
        signal.signal(signal.SIGUSR1, lambda *_: (came.append(1), store.set("handled", "")))
        _once_it_waits(signal.SIGUSR1)
    else:
        store.wait(["handled"], HOUR)  # set while the other rank waits
    dist.recv(x, 1) if kind == "recv" and r.rank == 0 else dist.send(x, 0) if kind == "recv" else dist.all_reduce(x)
    assert len(came) == (1 if r.rank == 0 else 0)
    assert x[0].item() == pytest.approx(1 if kind == "recv" else 2)


@pytest.mark.on(2, timeout=DEADLINE_S)
def test_ctrl_c_ends_the_wait_for_a_peer_of_a_new_group(r):
    r.init(timeout_s=NEVER_S)
    store = dist.distributed_c10d._get_default_store()
    if r.rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            dist.new_group(ranks=[0, 1])
        store.set("interrupted", "")
    store.wait(["interrupted"], HOUR)
    x = torch.ones(10)
    dist.all_reduce(x)
    assert x[0].item() == 2
