"""Ranks that end cleanly, whatever they still hold: every exit code is looked at, through the whole of an exit."""

import time

import pytest
import torch
import torch.distributed as dist
from group_check import check_group

CPU = torch.device("cpu")
_kept = []  # objects that live until the interpreter ends


class _SlowToGo:
    """An object that a callback holds and that takes the interpreter's lock again and again while it goes."""

    def __call__(self, future):
        return future.value()

    def __del__(self):
        for _ in range(40):
            time.sleep(0.005)


HOWS = ("destroy", "no destroy", "works kept", "group kept", "backend kept", "one destroys", "late rank", "exception")
HOWS += ("callback under way", "op under way")
# The tests of registration end fresh interpreters with a destroy.
FRESH = pytest.param("no destroy", marks=pytest.mark.on(2, start="spawn"), id="fresh interpreters")


@pytest.mark.later
@pytest.mark.parametrize("how", [*(pytest.param(how, marks=pytest.mark.on(2)) for how in HOWS), FRESH])
def test_clean_exit(r, how):
    """After training by DDP, some runs of which plain gloo is known to end by an abort."""
    r.init("lowcomm")
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
    check_group(r)
    if how == "works kept":
        _kept.append(dist.all_gather_into_tensor(torch.empty(3 * r.size), torch.ones(3), async_op=True))
        _kept.append(dist.all_reduce(torch.ones(3), async_op=True))
        _kept.append(_kept[0].get_future().then(lambda f: f.value()))
        for work in _kept[:2]:
            work.wait()
    if how == "callback under way":
        dist.all_reduce(torch.ones(3), async_op=True).get_future().then(_SlowToGo()).wait()
    if how == "op under way":
        if r.rank:
            r.hear("issued")
        done = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(_SlowToGo())
        if r.rank:
            done.wait()
        else:
            r.say("issued")
        del done
    if how == "group kept":
        _kept.append(dist.group.WORLD)
        dist.destroy_process_group()
    if how == "backend kept":
        _kept.append(dist.group.WORLD._get_backend(CPU))
    if how == "one destroys" and r.rank == 0:
        dist.destroy_process_group()
    if how == "late rank" and r.rank == 1:
        time.sleep(0.5)
    if how == "destroy":
        dist.destroy_process_group()
    if how == "exception":
        try:
            raise RuntimeError("a frame that holds the model")
        except RuntimeError as e:
            _kept.append(e)
