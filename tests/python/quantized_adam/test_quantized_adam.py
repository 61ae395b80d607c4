"""lc.QuantizedAdam in real processes: AdamW in its warm-up, next to exact Adam after it, its bytes, its bits, its checkpoints."""

import copy
import math
import sys
from pathlib import Path

import ddp_model
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from diloco_model import differing, train
from kept_log import kept_log
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import torch_lowcomm as lc

WARM = 5
SETTINGS = {"lr": 3e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}


def _fresh(dtype=torch.float32, **options):
    torch.manual_seed(7)
    model = ddp_model.Net().to(dtype)
    return model, lc.QuantizedAdam(model.named_parameters(), **{**SETTINGS, "warmup_steps": WARM, **options})


def _same_on_all_ranks(tensors):
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, tensors)
    return all(not differing(every[0], other) for other in every)


def _own(optimizer):
    return copy.deepcopy(optimizer.state_dict())


def _shared(optimizer):
    state = _own(optimizer)["state"]
    return {n: {k: t for k, t in s.items() if not k.startswith("rank")} for n, s in state.items()}


@pytest.mark.on("quad")
def test_warm_up_is_adamw(r):
    """AdamW with averaged gradients; a scheduler, parameter groups and a closure are as with torch's."""
    r.init()
    torch.manual_seed(7)
    model = ddp_model.Net()
    plain = copy.deepcopy(model)

    def groups(of):
        return [
            {"params": [p for p in of.parameters() if p.ndim == 2], "weight_decay": 0.2},
            {"params": [p for p in of.parameters() if p.ndim == 1], "lr": 1e-2, "betas": (0.8, 0.95)},
        ]

    optimizer = lc.QuantizedAdam(groups(model), **SETTINGS)
    adamw = torch.optim.AdamW(groups(plain), **SETTINGS)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: step / 4) for o in (optimizer, adamw)]
    for step in range(12):

        def closure(step=step):
            loss = ddp_model.loss_of(model, r.rank, step, spare=True)
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0
        optimizer.zero_grad()
        mean = sum(ddp_model.loss_of(plain, rank, step, spare=True) for rank in range(r.size)) / r.size
        mean.backward()
        adamw.step()
        adamw.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-6)
    assert _same_on_all_ranks(list(model.parameters()))


def _learns(r, optimizer_of):
    """A byte GPT on real text: the mean loss of all ranks' last ten steps."""
    sys.path.append(str(Path(__file__).parents[3] / "examples"))  # of a pool's ranks
    import data
    import model as gpt

    torch.manual_seed(0)
    model = gpt.GPT(gpt.Config(width=48, layers=2, heads=2, context=32))
    corpus = data.load(None, context=32)
    optimizer = optimizer_of(model)
    losses = []
    for step in range(80):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 20)
        x, y = corpus.batch(8, 32, seed=0, step=step, rank=r.rank)
        loss = model(x, y)
        loss.backward()
        if not isinstance(optimizer, lc.QuantizedAdam):
            for p in model.parameters():
                dist.all_reduce(p.grad, dist.ReduceOp.AVG)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert _same_on_all_ranks(list(model.parameters()))
    mean = torch.tensor(losses[-10:]).mean()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    return mean.item()


@pytest.mark.later
@pytest.mark.on("pair", group={}, timeout=300)
def test_learns_as_exact_adam_does(r):
    exact = _learns(r, lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3))
    quantized = _learns(r, lambda model: lc.QuantizedAdam(model.parameters(), lr=3e-3, warmup_steps=20))
    assert exact < 3 and quantized / exact < 1.03, (exact, quantized)


def _bytes(r, codec):
    """Every element is coded after the warm-up, and a step sends the bytes that the codec takes for its slices."""
    r.init()
    model, optimizer = _fresh(codec=codec)
    train(model, optimizer, r.rank, range(WARM))
    (ops,) = lc.stats().values()
    warm = ops["quantized_adam_warmup"]
    lc.reset_stats()
    train(model, optimizer, r.rank, range(WARM, WARM + 8))
    (ops,) = lc.stats().values()
    assert {op for op, figures in ops.items() if figures["calls"]} == {"quantized_adam"}
    coded = ops["quantized_adam"]
    assert coded["calls"] == 8 and coded["exact_calls"] == 0 and coded["relative_error"] > 0
    sizes = [p.numel() for p in model.parameters()]
    one = lc.codec(codec)
    # Of W ranks together: each slice goes to its owner from W − 1 ranks, and its sum back to them.
    payload = sum(ddp_model.slice_bytes(one, 512, n, r.size) for n in sizes) * 2 * (r.size - 1)
    return warm["wire_bytes"] / WARM, coded["wire_bytes"] / 8, payload, sum(sizes)


@pytest.mark.parametrize("codec", ["sym4:bucket=512", "gauss2"])
def test_bytes_are_the_codecs(pair, codec):
    found = pair(_bytes, codec)
    (*_, payload, elements), sent = found[0], sum(coded for _, coded, *_ in found)
    headers = 64 * 2 * 2 + 2048  # two frames a rank, and descriptions
    assert payload <= sent <= payload + headers, (payload, sent)
    assert 8 * elements <= sum(warm for warm, *_ in found) <= 8 * elements + headers


@pytest.mark.parametrize(("dtype", "codec"), [(torch.float32, "gauss4"), (torch.bfloat16, "qsgd4:bucket=128")], ids=str)
def test_bits_are_kept(r, dtype, codec):
    """All ranks have the same parameters and moments, and a resumed run goes on with the same bits."""
    r.init()
    model, optimizer = _fresh(dtype, codec=codec)
    assert get_optimizer_state_dict(model, optimizer)["state"].keys() == dict(model.named_parameters()).keys()
    train(model, optimizer, r.rank, range(WARM + 4))
    saved, weights = _own(optimizer), copy.deepcopy(model.state_dict())
    kept = {"optimizer": get_optimizer_state_dict(model, optimizer), "model": weights}
    dcp.save(kept, checkpoint_id=r.path("dcp"))
    train(model, optimizer, r.rank, range(WARM + 4, WARM + 12))
    assert _same_on_all_ranks([list(model.parameters()), _shared(optimizer)])
    residual = saved["state"][0][f"rank{r.rank}.residual"]
    assert residual.dtype == torch.float32 and residual.abs().max() > 0
    for how in ("plain", "dcp"):
        again, other = _fresh(dtype, codec=codec)
        if how == "plain":
            again.load_state_dict(weights)
            other.load_state_dict(saved)
        else:
            kept = {"optimizer": get_optimizer_state_dict(again, other), "model": again.state_dict()}
            dcp.load(kept, checkpoint_id=r.path("dcp"))
            set_optimizer_state_dict(again, other, kept["optimizer"])
        train(again, other, r.rank, range(WARM + 4, WARM + 12))
        assert not differing(_own(other)["state"], _own(optimizer)["state"]), how
        assert not differing(again.state_dict(), model.state_dict()), how


def test_a_step_that_is_not_finite(r):
    r.init()
    model, optimizer = _fresh()
    for steps in (2, WARM + 2):
        train(model, optimizer, r.rank, range(steps))
        before, weights = _own(optimizer), ddp_model.weights(model)
        ddp_model.loss_of(model, r.rank, 0, spare=True).backward()
        if r.rank == 1:
            model.down.weight.grad[3, 4] = math.inf
        with pytest.raises(
            ValueError, match=f"down.weight on {'this' if r.rank == 1 else 'another'} rank; the step was"
        ):
            optimizer.step()
        assert not differing(_own(optimizer), before) and not differing(ddp_model.weights(model), weights)
        optimizer.zero_grad()
    # A gradient scaler skips that step, on all ranks.
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for spoilt in (True, False):
        scaler.scale(ddp_model.loss_of(model, r.rank, 1, spare=True)).backward()
        if spoilt and r.rank == 1:
            model.down.weight.grad[3, 4] = math.nan
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert differing(_own(optimizer), before) == [] if spoilt else True
    assert _same_on_all_ranks([list(model.parameters()), _shared(optimizer)])
    assert differing(ddp_model.weights(model), weights)


def test_mistakes(r):
    r.init()
    model = ddp_model.Net()
    for options, error, said in [
        ({"codec": "none"}, ValueError, "codec: expected one that rounds, got 'none'"),
        ({"codec": "sym4:axis=channel"}, ValueError, "codec: expected one of flat tensors"),
        ({"codec": "levels4"}, ValueError, "codec: expected one of flat tensors"),
        ({"codec": "nope4"}, ValueError, "nope4"),
        ({"warmup_steps": 0}, ValueError, "warmup_steps: expected 1 or more.*got 0"),
        ({"warmup_steps": 2.5}, TypeError, "warmup_steps: expected an integer, got 2.5"),
        ({"check_every": -1}, ValueError, "check_every: expected 0 or more, got -1"),
        ({"seed": -1}, ValueError, "seed: expected 0 or more, got -1"),
        ({"lr": -1.0}, ValueError, "lr: expected a finite number of 0 or more, got -1.0"),
        (
            {"warmup_steps": 1},
            ValueError,
            "warmup_steps: expected so many that 3 squared gradients .* got 1 with β2 = 0.999",
        ),
        ({"betas": (0.9, 0.4)}, ValueError, "got 100 with β2 = 0.4, in which 2.3 count"),
        ({"betas": (0.9, 1.0)}, ValueError, r"betas: expected two numbers in \[0, 1\), got"),
    ]:
        with pytest.raises(error, match=said):
            lc.QuantizedAdam(model.parameters(), **options)
    with pytest.raises(TypeError, match="group 0, parameter 0 .3.: expected a dense floating-point tensor"):
        lc.QuantizedAdam([torch.zeros(3, dtype=torch.complex64, requires_grad=True)])
    # Of one rank alone: the other hears of it in its first step, and both go on.
    if r.rank == 0:
        with pytest.raises(ValueError, match="got -1"):
            lc.QuantizedAdam(model.parameters(), lr=-1)
    else:
        optimizer = lc.QuantizedAdam(model.parameters())
        with pytest.raises(dist.DistBackendError, match="rank 0.*lr: expected a finite number"):
            optimizer.step()
    for options, said in [
        ({"lr": 1e-3 * (1 + r.rank)}, "hyper-parameters differs"),
        ({"codec": "sym4" if r.rank else "sym8"}, "options differs"),
    ]:
        model, optimizer = _fresh(**options)
        with pytest.raises(dist.DistBackendError, match=said):
            train(model, optimizer, r.rank, range(1))
    model, optimizer = _fresh()
    with pytest.raises(ValueError, match="load: .*: expected 'exp_avg' in the state, got none"):
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
    train(model, optimizer, r.rank, range(WARM + 2))
    other = nn.Parameter(torch.ones(600, 2))
    optimizer.add_param_group({"params": [("other", other)], "lr": 1e-2})
    other.grad = torch.full_like(other, 1.0 + r.rank)
    train(model, optimizer, r.rank, range(1))
    assert 0 < (1 - other).abs().max() < 0.02 and _same_on_all_ranks([list(model.parameters()), other])
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer.add_param_group({"params": [("frozen", frozen)]})
    frozen.requires_grad_().grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"a tensor of shape \(3,\): expected gradients of the .* got one of another"):
        optimizer.step()


def test_ddp_around_the_parameters_is_refused(r):
    """Refused as it is made, or in the first step where DDP comes later, on every rank before anything is sent."""
    r.init()
    model = nn.parallel.DistributedDataParallel(ddp_model.Net())
    with pytest.raises(
        ValueError, match=r"expected parameters without DDP, .* over the ranks \[[01]\] too.*Leave DDP out"
    ):
        lc.QuantizedAdam(model.parameters())
    later = ddp_model.Net()
    optimizer = lc.QuantizedAdam(later.parameters())
    wrapped = nn.parallel.DistributedDataParallel(later)
    ddp_model.loss_of(wrapped, r.rank, 0, spare=True).backward()
    with pytest.raises(ValueError, match="expected parameters without DDP"):
        optimizer.step()
    alone = [dist.new_group([rank]) for rank in range(r.size)][r.rank]
    model = nn.parallel.DistributedDataParallel(ddp_model.Net(), process_group=alone)
    optimizer = lc.QuantizedAdam(model.parameters())
    ddp_model.loss_of(model, r.rank, 0, spare=True).backward()
    optimizer.step()


@pytest.mark.on("pair", group={})
def test_gradients_that_outgrow_the_warm_up_are_warned_of_once(r):
    """Gradients that are larger behind the warm-up than in it: the denominators stay as they were."""
    for factor in (1, 30):
        model, optimizer = _fresh()
        with kept_log() as lines:
            for step in range(WARM + 3):
                loss = ddp_model.loss_of(model, r.rank, step, spare=True)
                (loss * (factor if step >= WARM else 1)).backward()
                optimizer.step()
                optimizer.zero_grad()
        said = [line for line in lines if "its gradients are" in line]
        assert len(said) == (factor > 1)
    assert "times as large as in the warm-up of 5 steps" in said[0] and "Take more warmup_steps" in said[0]
