"""How a group ends, before its process does: time-outs, abort, shutdown, destroy, and names that come back."""

import datetime
import threading
import time

import pytest
import ranks
import torch
import torch.distributed as dist
from group_check import check_group

CPU = torch.device("cpu")
NEVER_S = 600.0  # longer than the harness gives the ranks: who waits for it fails


def _timeout(r, how):
    """The last rank stays out of an op; the others fail by the time-out that was set, and say which and whom."""
    r.init("lowcomm", timeout_s=4 if how == "init" else NEVER_S)
    group = dist.group.WORLD
    check_group(r)
    if how == "new_group":
        group = dist.new_group(timeout=datetime.timedelta(seconds=4))
    if how == "set_timeout":
        group.set_timeout(datetime.timedelta(seconds=4))
    if r.rank == r.size - 1:
        r.hear("done0")
        return
    with pytest.raises(dist.DistBackendError, match="all_gather") as failure:
        dist.all_gather_into_tensor(torch.empty(3 * r.size), torch.ones(3), group=group)
    for part in (f"rank {r.size - 1}", "Timed out waiting 4000ms", "progress deadline 4000 ms"):
        assert part in str(failure.value), failure.value
    r.say(f"done{r.rank}")


@pytest.mark.later
@pytest.mark.parametrize("how", ["init", "new_group", "set_timeout"])
def test_timeouts(how):
    ranks.run_ranks(_timeout, 2, how)


def _abort(r, how):
    r.init("lowcomm", timeout_s=NEVER_S)
    group = dist.group.WORLD
    check_group(r)
    if r.rank != 0:
        r.hear("aborted")
        return
    work = dist.reduce_scatter_tensor(torch.empty(3), torch.ones(3 * r.size), async_op=True)
    time.sleep(0.1)
    assert not work.is_completed()
    if how == "thread":
        threading.Timer(0.3, group.abort).start()
    else:
        group.abort()
    with pytest.raises(dist.DistBackendError, match="reduce_scatter"):
        work.wait()
    if how == "twice":
        group.abort()
    with pytest.raises(dist.DistBackendError):
        dist.all_gather_into_tensor(torch.empty(3 * r.size), torch.ones(3))
    r.say("aborted")


@pytest.mark.later
@pytest.mark.parametrize("how", ["thread", "once", "twice"])
def test_abort_ends_what_waits(how):
    ranks.run_ranks(_abort, 2, how)


def _shutdown(r):
    r.init("lowcomm")
    group = dist.group.WORLD
    out = torch.empty(3 * r.size)
    work = dist.all_gather_into_tensor(out, torch.ones(3), async_op=True)
    work.wait()
    dist.barrier()
    group.shutdown()
    group.shutdown()
    with pytest.raises((RuntimeError, ValueError)):
        dist.all_gather_into_tensor(out, torch.ones(3))
    dist.destroy_process_group()
    r.init("lowcomm")
    check_group(r)
    dist.destroy_process_group()


def test_shutdown_twice():
    ranks.run_ranks(_shutdown, 2)


def _pending_destroy(r):
    """Destroying waits for what is queued, and the results are there after it."""
    r.init("lowcomm")
    outs = [torch.empty(10_000 * r.size) for _ in range(20)]
    works = [dist.all_gather_into_tensor(o, torch.full((10_000,), float(k)), async_op=True) for k, o in enumerate(outs)]
    dist.destroy_process_group()
    for k, (work, out) in enumerate(zip(works, outs, strict=True)):
        work.wait()
        assert torch.equal(out, torch.full_like(out, float(k))), k


def test_destroy_drains_the_queue():
    for _ in range(3):
        ranks.run_ranks(_pending_destroy, 2)


def _reused_names(r):
    """Names of groups come back after a destroy: a later group must never be taken for one that is still referred to."""
    import torch_lowcomm as lc

    r.init("lowcomm")
    groups = [dist.group.WORLD, dist.new_group()]
    for group in groups:
        check_group(r, group)
    names = [group.group_name for group in groups]
    held = groups, [group._get_backend(CPU) for group in groups]
    assert set(names) <= set(lc.stats())
    dist.destroy_process_group()
    assert not set(names) & set(lc.stats()), "a group that was destroyed is still counted"
    r.init("gloo")
    groups = [dist.group.WORLD, dist.new_group()]
    assert [group.group_name for group in groups] == names
    for group in groups:
        for call in (lambda group=group: lc.set_policy(group, ""), lambda group=group: lc.stats(group)):
            with pytest.raises(ValueError, match="lowcomm"):
                call()
    for group in groups:
        dist.barrier(group=group)  # nobody leaves while another is still connecting
    dist.destroy_process_group()
    r.init("lowcomm")
    lc.set_policy(None, "all_gather=minmax8")
    check_group(r)
    del held


def test_a_dead_groups_name_means_nothing(pair):
    pair(_reused_names)
