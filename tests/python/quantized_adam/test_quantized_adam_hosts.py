"""lc.QuantizedAdam over hosts of several ranks: each rank steps a share of the parameters, and one coded copy leaves a host."""

import copy
import os

import ddp_model
import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh

import torch_lowcomm as lc

WARM = 4
SETTINGS = {"lr": 3e-3, "betas": (0.9, 0.99), "weight_decay": 0.1, "warmup_steps": WARM}
HOSTS = [[2, 0], [1, 3]]


def made(hosts=HOSTS, dtype=torch.float32, **options):
    torch.manual_seed(7)
    model = ddp_model.Net().to(dtype)
    given = DeviceMesh("cpu", hosts) if isinstance(hosts, list) else hosts
    return model, lc.QuantizedAdam(model.named_parameters(), hosts=given, **{**SETTINGS, **options})


def train(model, optimizer, rank, steps, spoilt=()):
    """Steps with these numbers; a rank of `spoilt`, (step, rank), has a NaN in its gradients of that step."""
    losses = []
    for step in steps:
        x, y = ddp_model.batch(rank, step)
        loss = (model(x.to(next(model.parameters()).dtype), spare=True) - y).square().mean()
        loss.backward()
        if (step, rank) in spoilt:
            model.down.weight.grad[3, 3] = float("nan")
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def weights(model):
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


@pytest.mark.on("quad", alike=True)
def test_warm_up_is_adamw(r):
    r.init()
    model, optimizer = made(warmup_steps=20)
    plain = copy.deepcopy(model)
    adamw = torch.optim.AdamW(plain.parameters(), lr=3e-3, betas=(0.9, 0.99), weight_decay=0.1)
    train(model, optimizer, r.rank, range(6))
    for step in range(6):
        ddp_model.loss_of(plain, r.rank, step, spare=True).backward()
        for p in plain.parameters():
            dist.all_reduce(p.grad.div_(r.size))
        adamw.step()
        adamw.zero_grad()
    torch.testing.assert_close(weights(model), weights(plain), rtol=1e-4, atol=1e-6)
    return weights(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.on("quad")
def test_codes_between_hosts_are_those_of_two_ranks(r, dtype):
    """Four ranks on two hosts learn as two ranks do that have the hosts' batches; all ranks have the same bits."""
    r.init()
    model, optimizer = made(dtype=dtype)
    losses = train(model, optimizer, r.rank, range(30))
    everyones = [None] * r.size
    dist.all_gather_object(everyones, (weights(model), losses))
    assert all(torch.equal(w, everyones[0][0]) for w, _ in everyones)
    exact, plain = made("flat", dtype=dtype, warmup_steps=1000)
    exactly = train(exact, plain, r.rank, range(30))
    ends = torch.tensor([sum(losses[-5:]), sum(exactly[-5:])])
    dist.all_reduce(ends)
    assert ends[0] < 1.1 * ends[1]
    assert not torch.equal(weights(model), weights(exact))


@pytest.mark.parametrize("ranks_a_host", [2, 4])
def test_a_hosts_link_carries_what_one_ranks_does(ranks_a_host):
    n = ranks_a_host
    flat = ranks.run_ranks(_bytes_sent, 2, "flat")
    hosts = ranks.run_ranks(_bytes_sent, 2 * n, [list(range(n)), list(range(n, 2 * n))])
    assert sum(hosts[:n]) == pytest.approx(flat[0], rel=0.01)
    assert max(hosts) <= 1.05 * min(hosts), "equal shares"


def _bytes_sent(r, hosts):
    r.init()
    torch.manual_seed(7)
    model = torch.nn.Linear(512, 1024)
    given = DeviceMesh("cpu", hosts) if isinstance(hosts, list) else hosts
    optimizer = lc.QuantizedAdam(model.parameters(), hosts=given, warmup_steps=4, betas=(0.9, 0.9))
    for _ in range(5):
        lc.reset_stats()
        model(torch.randn(4, 512)).square().mean().backward()
        optimizer.step()
    return sum(of["quantized_adam"]["wire_bytes"] for of in lc.stats().values() if "quantized_adam" in of)


@pytest.mark.on("quad")
def test_a_nan_drops_the_step_on_all_ranks(r):
    """In the warm-up and after it; in a share of one place, which the other places' ranks do not see."""
    r.init()
    model, optimizer = made()
    where = "this host" if r.rank in HOSTS[0] else "another rank"
    for step in (1, WARM + 2):
        train(model, optimizer, r.rank, range(step - 1, step))
        before, state = weights(model), copy.deepcopy(optimizer.state_dict())
        with pytest.raises(ValueError, match=f"NaN.*in down.weight on {where}"):
            train(model, optimizer, r.rank, [step], spoilt={(step, 2)})
        optimizer.zero_grad()
        assert torch.equal(weights(model), before)
        after = optimizer.state_dict()["state"]
        for number, kept in state["state"].items():
            assert all(torch.equal(t, after[number][name]) for name, t in kept.items())
        train(model, optimizer, r.rank, [step])


@pytest.mark.on("quad", alike=True)
def test_a_gradient_scaler_skips_on_all_ranks(r):
    """Its scales, which differ from then on, make no difference to what is learned."""
    r.init()
    model, optimizer = made()
    plain, other = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(WARM + 3):
        loss = ddp_model.loss_of(model, r.rank, step, spare=True)
        scaler.scale(loss).backward()
        before = weights(model)
        if (step, r.rank) == (WARM + 1, 1):
            model.up.bias.grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(weights(model), before) == (step == WARM + 1)
        train(plain, other, r.rank, [] if step == WARM + 1 else [step])
    assert torch.equal(weights(model), weights(plain))
    return weights(model)


@pytest.mark.on("quad")
def test_a_resumed_run_goes_on_with_the_same_bits(r):
    r.init()
    model, optimizer = made(dtype=torch.bfloat16)
    train(model, optimizer, r.rank, range(WARM + 3))
    kept, values = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    train(model, optimizer, r.rank, range(WARM + 3, WARM + 6))
    again, other = made(dtype=torch.bfloat16)
    again.load_state_dict(values)
    other.load_state_dict(kept)
    train(again, other, r.rank, range(WARM + 3, WARM + 6))
    assert torch.equal(weights(again), weights(model))
    _, flat = made("flat", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="expected 'exp_avg', as a run has with the same hosts="):
        flat.load_state_dict(kept)


@pytest.mark.on("quad", timeout=60)
def test_distributed_checkpoints(r, tmp_path):
    r.init()
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    model, optimizer = made()
    train(model, optimizer, r.rank, range(WARM + 2))
    values = copy.deepcopy(model.state_dict())
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder[0])
    train(model, optimizer, r.rank, range(WARM + 2, WARM + 4))
    again, other = made()
    again.load_state_dict(values)
    state = {"optimizer": get_optimizer_state_dict(again, other)}
    dcp.load(state, checkpoint_id=folder[0])
    set_optimizer_state_dict(again, other, state["optimizer"])
    train(again, other, r.rank, range(WARM + 2, WARM + 4))
    assert torch.equal(weights(again), weights(model))


@pytest.mark.on("quad")
def test_mistakes(r):
    r.init()
    with pytest.raises(TypeError, match="hosts: expected 'auto', 'flat' or a DeviceMesh, got int"):
        lc.QuantizedAdam([torch.nn.Parameter(torch.ones(4))], hosts=2)
    with pytest.raises(ValueError, match=r"without gaps, got strides \(8, 2\)"):
        made_of = torch.nn.Parameter(torch.ones(4, 8)[:, ::2])
        lc.QuantizedAdam([made_of], hosts=DeviceMesh("cpu", HOSTS))


@pytest.mark.on("quad")
def test_ranks_of_a_host_that_begin_apart_are_named(r):
    r.init()
    model, optimizer = made()
    with torch.no_grad():
        model.up.weight[0, 0] += r.rank > 1
    with pytest.raises(dist.DistBackendError, match="expected the same parameters on all ranks of a host"):
        train(model, optimizer, r.rank, [0])


@pytest.mark.on("quad")
def test_memory_that_was_exchanged_is_named(r):
    r.init()
    model, optimizer = made()
    train(model, optimizer, r.rank, [0])
    model.up.weight.data = model.up.weight.data.clone()
    with pytest.raises(ValueError, match="expected the memory that it had when it was added"):
        train(model, optimizer, r.rank, [1])


@pytest.mark.on(4, timeout=60, allow_exit={3: 7})
def test_a_rank_that_dies_is_an_error_on_every_other(r):
    r.init()
    model, optimizer = made()
    train(model, optimizer, r.rank, range(WARM + 1))
    before = weights(model)
    dist.barrier()
    if r.rank == 3:
        os._exit(7)
    with pytest.raises(dist.DistBackendError):
        train(model, optimizer, r.rank, [WARM + 1])
    assert torch.equal(weights(model), before)
