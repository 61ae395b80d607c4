"""The ranges of lowcomm's own ops in torch.profiler: ranges from the thread that ran them, and none that lie."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import torch_lowcomm as lc

N = 1 << 20
POLICY = "all_gather=minmax8; reduce_scatter=qsgd8; all_reduce=sym4; p2p=sym4"
PARTS = ("encode", "wait", "decode")


def _init(r):
    r.init("lowcomm", pg_options=lc.Options(policy=POLICY, min_bytes=0))


def _exchange(r):
    works = [dist.irecv(torch.empty(N), 1 - r.rank), dist.isend(torch.ones(N), 1 - r.rank)]
    for work in works:
        work.wait()


OPS = {
    "all_gather": lambda r: dist.all_gather_into_tensor(torch.empty(N * r.size), torch.ones(N)),
    "reduce_scatter": lambda r: dist.reduce_scatter_tensor(torch.empty(N), torch.ones(N * r.size)),
    "all_reduce": lambda r: dist.all_reduce(torch.ones(N)),
    "send": _exchange,
    "recv": _exchange,
}


def _ranges(prof, op):
    """{name after lowcomm::<op>: events}."""
    found = {}
    for event in prof.events():
        if event.name == f"lowcomm::{op}" or event.name.startswith(f"lowcomm::{op}::"):
            found.setdefault(event.name.removeprefix(f"lowcomm::{op}"), []).append(event)
    return found


@pytest.mark.parametrize("op", OPS)
def test_ranges(r, op):
    _init(r)
    run = OPS[op]
    run(r)
    before = time.time_ns()
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        run(r)
        run(r)
    after = time.time_ns()
    found = _ranges(prof, op)
    parts = {"send": ("encode", "wait"), "recv": ("wait", "decode")}.get(op, PARTS)
    assert set(found) == {"", *(f"::{part}" for part in parts)}, sorted(found)
    assert len(found[""]) == 2
    slack_us = 1
    for part in parts:
        for event in found[f"::{part}"]:
            span = event.time_range
            assert any(
                whole.time_range.start - slack_us <= span.start
                and span.end <= whole.time_range.end + slack_us
                and whole.thread == event.thread
                for whole in found[""]
            ), (part, span.start, span.end)
    longest_us = (after - before) / 1000
    for whole in found[""]:
        assert 0 < whole.time_range.elapsed_us() < longest_us
    first, second = sorted(found[""], key=lambda event: event.time_range.start)
    assert first.time_range.end <= second.time_range.start + slack_us
    issued = min(e.thread for e in prof.events() if not e.name.startswith("lowcomm::"))
    if op not in ("send", "recv"):
        assert {event.thread for event in found[""]} != {issued}, "from the worker"
    # In order with what the program's own thread did: an op lies after the tensors that it was given were made.
    filled = [e.time_range.start for e in prof.events() if e.name == "aten::ones"]
    assert min(filled) <= first.time_range.end + slack_us


def test_table_and_trace(r):
    """In the aggregate, and in the trace that is exported."""
    _init(r)
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        OPS["all_gather"](r)
    rows = {row.key: row for row in prof.key_averages()}
    assert rows["lowcomm::all_gather"].count == 1
    path = r.path(f"trace{r.rank}.json")
    prof.export_chrome_trace(str(path))
    assert "lowcomm::all_gather::encode" in path.read_text()


@pytest.mark.on(2, timeout=120)
def test_an_op_that_outlives_its_profiler(r):
    """Profilers that stop while ops are under way, over and over: nobody writes to what they have left.

    In fresh processes: a heap that was written to shows at their end.
    """
    _init(r)
    for _ in range(8):
        with profile(activities=[ProfilerActivity.CPU]):
            works = [
                dist.all_gather_into_tensor(torch.empty(N * r.size), torch.ones(N), async_op=True) for _ in range(3)
            ]
        for work in works:
            work.wait()
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        OPS["all_gather"](r)
    assert len(_ranges(prof, "all_gather")[""]) == 1
