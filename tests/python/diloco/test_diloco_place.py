"""lc.DiLoCoX with outer_place="device": on the CPU the bits of "host", in every form that has it, and refused in others."""

import diloco_model
import pytest
import ranks
import torch
import torch.distributed as dist
from elastic_machine import TrainingResult, join
from test_diloco_sites import SETTINGS, _trains

import torch_lowcomm as lc

STEPS, SAVED = 13, 7
CASES = {
    "continue": {"codec": "sym4:bucket=64"},
    "sync": {"codec": "gauss2", "mode": "sync", "average_buffers": True},
    "exact": {"codec": None, "sync_warmup": 1},
    "stochastic": {"codec": "qsgd4:bucket=64", "mode": "restart", "outer_momentum": 0.0},
    "sparse": {"codec": "topk:keep=0.1,values=mid2", "error_feedback": True, "mode": "sync"},
    "streaming": {
        "mode": "restart",
        "fragments": 3,
        "fragment_sync_delay": 2,
        "fragment_update_alpha": 0.25,
    },
}


def _place(r, how):
    """Where this rank keeps its outer state: "mixed" is on the host for one rank and not for the other."""
    return {"outer_place": "device" if how == "device" or (how == "mixed" and r.rank == 1) else "host"}


def _ended(r, options, how, dtype=torch.float32):
    r.init()
    model, optimizer = diloco_model.fresh(**options, **_place(r, how))
    diloco_model.train(model, optimizer, r.rank, range(STEPS))
    return diloco_model.ended(model, optimizer)


@pytest.mark.later
@pytest.mark.parametrize("case", CASES)
def test_has_the_hosts_bits(pair, case):
    expected = pair(_ended, CASES[case], "host")
    for how in ("device", "mixed"):
        assert not diloco_model.differing(pair(_ended, CASES[case], how), expected), how


def _narrow(r, how):
    r.init()
    torch.manual_seed(7)
    model = diloco_model.Net().to(torch.bfloat16)
    optimizer = lc.DiLoCoX(torch.optim.SGD(model.parameters(), lr=0.05), 3, model=model, **_place(r, how))
    draws = torch.Generator().manual_seed(r.rank)
    for _ in range(STEPS):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=draws).to(p.dtype)
        optimizer.step()
    return diloco_model.ended(model, optimizer)


def test_of_16_bit_parameters(pair):
    assert not diloco_model.differing(pair(_narrow, "device"), pair(_narrow, "host"))


def _resumes(r, first, then):
    """Saved while a message is under way, and loaded where the state has another place."""
    options = {"codec": "sym4:bucket=64"}
    r.init()
    model, optimizer = diloco_model.fresh(**options, **_place(r, first))
    diloco_model.train(model, optimizer, r.rank, range(SAVED))
    saved, weights = optimizer.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
    diloco_model.train(model, optimizer, r.rank, range(SAVED, STEPS))
    whole = diloco_model.ended(model, optimizer)
    dist.destroy_process_group()
    r.init()
    model, optimizer = diloco_model.fresh(**options, **_place(r, then))
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    diloco_model.train(model, optimizer, r.rank, range(SAVED, STEPS))
    assert not diloco_model.differing(diloco_model.ended(model, optimizer), whole)


@pytest.mark.parametrize("first,then", [("device", "device"), ("device", "host"), ("host", "device")])
def test_a_state_is_of_either_place(pair, first, then):
    pair(_resumes, first, then)


@pytest.mark.later
@pytest.mark.parametrize("how,setting", [("ddp", "continue"), ("fsdp2", "streaming")])
def test_sites_of_two_ranks(how, setting):
    placed = ranks.run_ranks(_trains, 4, how, SETTINGS[setting] | {"outer_place": "device"}, timeout=180)
    expected = ranks.run_ranks(_trains, 4, how, SETTINGS[setting], timeout=180)
    for (got, sent, report, kept), (bits, sent_by_host, report_of_host, kept_by_host) in zip(
        placed, expected, strict=True
    ):
        assert not diloco_model.differing(got, bits)
        assert (sent, kept) == (sent_by_host, kept_by_host)
        assert report["stripe_elements"] == report_of_host["stripe_elements"]


def _comes_late(r, port):
    """Machines whose states have other places: the late one takes the other's."""
    if r.rank == 1:
        r.hear("begun")
    members = join(port, f"machine{r.rank}", min_machines=1)
    trained = TrainingResult(members, r.rank, mode="continue", **_place(r, "mixed"))
    if r.rank == 0:
        trained.steps(8)
        r.say("begun")
    while trained.opt.report["participating"] < 2:
        trained.steps(1, pause_s=0.02)
    assert trained.opt.report["outer_steps"] > 0
    trained.steps(12)
    assert trained.lost == []
    outer = trained.outer()
    members.leave()
    return outer


def test_a_late_machine_takes_the_state(store):
    first, second = ranks.run_ranks(_comes_late, 2, store.port, timeout=90)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _memory(r):
    r.init()
    memory = {}
    for mode in ("sync", "continue"):
        parameters = [torch.nn.Parameter(torch.ones(256, 256))]
        loop = lc.DiLoCoX(torch.optim.SGD(parameters, lr=0.1), 1, mode=mode, outer_place="device")
        for _ in range(3):
            with torch.no_grad():
                parameters[0].mul_(0.9)
            loop.step()
        loop.finish()
        memory[mode] = {name: size / parameters[0].numel() for name, size in loop.report["memory"].items() if size}
    return memory


def test_memory_is_reported(pair):
    for memory in pair(_memory):
        assert memory["sync"] == {"outer": 4, "momentum": 4, "average": 4, "residual": 8, "total": 20}
        assert memory["continue"] == memory["sync"] | {"start": 4, "total": 24}
