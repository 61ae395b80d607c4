"""How a group ends, before its process does: time-outs, abort, shutdown, destroy, and names that come back."""

import datetime

import pytest
import torch
import torch.distributed as dist
from group_check import check_group

import torch_lowcomm as lc

CPU = torch.device("cpu")
NEVER_S = 600.0  # longer than the harness gives the ranks: who waits for it fails


@pytest.mark.later
@pytest.mark.on(2)
def test_a_groups_own_timeout(r):
    """The last rank stays out of an op; the others fail by the time-out that was set, and say which and whom."""
    r.init("lowcomm", timeout_s=NEVER_S)
    check_group(r)
    group = dist.new_group(timeout=datetime.timedelta(seconds=4))
    if r.rank == r.size - 1:
        r.hear("done0")
        return
    with pytest.raises(dist.DistBackendError, match="all_gather") as failure:
        dist.all_gather_into_tensor(torch.empty(3 * r.size), torch.ones(3), group=group)
    for part in (f"rank {r.size - 1}", "Timed out waiting 4000ms", "progress deadline 4000 ms"):
        assert part in str(failure.value), failure.value
    r.say(f"done{r.rank}")


@pytest.mark.on(2)
def test_shutdown_twice(r):
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


def test_a_dead_groups_name_means_nothing(r):
    """Names of groups come back after a destroy: a later group must never be taken for one that is still referred to."""
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
