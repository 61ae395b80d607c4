"""lc.DiLoCoX where the optimizer was: schedulers, clipping, closures, evaluation, buffers, what an outer step says."""

import ddp_model
import pytest
import torch
from diloco_model import differing
from kept_log import kept_log
from stages_case import gathered
from torch import nn

import torch_lowcomm as lc

MODES = ("sync", "continue", "restart")
EVERY = 3


def _inner(model):
    """AdamW in two groups, matrices and the rest."""
    return torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim == 1], "lr": 1e-2},
        ],
        lr=3e-3,
    )


def _make(**options):
    torch.manual_seed(7)
    model = ddp_model.Net()
    return model, lc.DiLoCoX(_inner(model), EVERY, model=model, **options)


def _steps(model, optimizer, rank, numbers, scheduler=None):
    for step in numbers:
        ddp_model.loss_of(model, rank, step, spare=True).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()


def _same_everywhere(value):
    first, *others = gathered(value)
    return not any(differing(first, other) for other in others)


@pytest.mark.on("pair", group={})
def test_an_existing_loop_goes_on_as_it_was(r):
    """The same loop, wrapped and not, up to the first outer step; after it the learning rates still."""
    model, optimizer = _make()
    assert isinstance(optimizer, torch.optim.Optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    plain = ddp_model.Net()
    plain.load_state_dict(model.state_dict())
    inner = _inner(plain)
    decay = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1 / (1 + step))
    # With a delay the first average moves the parameters when the second pseudo-gradient is due.
    _steps(model, optimizer, r.rank, range(2 * EVERY - 1), scheduler)
    _steps(plain, inner, r.rank, range(2 * EVERY - 1), decay)
    assert not differing(ddp_model.weights(model), ddp_model.weights(plain))
    _steps(model, optimizer, r.rank, range(2 * EVERY - 1, 2 * EVERY), scheduler)
    _steps(plain, inner, r.rank, range(2 * EVERY - 1, 2 * EVERY), decay)
    assert differing(ddp_model.weights(model), ddp_model.weights(plain))
    rates = [group["lr"] for group in inner.param_groups]
    assert [group["lr"] for group in optimizer.inner.param_groups] == rates
    assert [group["lr"] for group in optimizer.param_groups] == rates
    assert rates == pytest.approx([3e-3 / (1 + 2 * EVERY), 1e-2 / (1 + 2 * EVERY)])
    ddp_model.loss_of(model, r.rank, 0).backward()
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in model.up.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.on("pair", group={})
def test_outer_parameters_are_every_ranks(r, mode):
    model, optimizer = _make(mode=mode, codec="sym4:bucket=64", rank=4)
    begin = ddp_model.weights(model)
    _steps(model, optimizer, r.rank, range(2 * EVERY + 1))
    own = ddp_model.weights(model)
    with optimizer.outer_parameters():
        outer = ddp_model.weights(model)
        assert _same_everywhere(outer)
        assert differing(outer, begin) and differing(outer, own)
        for call in ("step", "finish", "restore"):
            with pytest.raises(ValueError, match=f"{call}: expected the rank's own parameters, got one inside"):
                getattr(optimizer, call)()
        with pytest.raises(ValueError, match="outer_parameters: expected to be outside of it"):
            with optimizer.outer_parameters():
                pass
        assert not differing(ddp_model.weights(model), outer), "a refusal moves nothing"
    assert not differing(ddp_model.weights(model), own)
    assert not _same_everywhere(own)
    with pytest.raises(KeyError), optimizer.outer_parameters():
        raise KeyError
    assert not differing(ddp_model.weights(model), own)
    report = optimizer.report
    assert report["outer_steps"] == 2 and report["participating"] == 2
    assert report["sync_every"] == EVERY and report["rank"] == 4
    assert report["effective_rank"] == 0  # measured only where something adapts to it
    assert report["sent_bytes"] > 1000 and report["waited_s"] >= 0 and report["local_s"] > 0
    optimizer.finish()
    ended = ddp_model.weights(model)
    assert _same_everywhere(ended)
    # One average was under way where there is a delay.
    assert bool(differing(ended, outer)) == (mode != "sync")
    assert f"sync_every={EVERY}, outer_steps=2" in repr(optimizer)


@pytest.mark.on("pair", group={})
def test_inner_optimizers_may_take_a_closure(r):
    model = nn.Linear(ddp_model.WIDTH, 7)
    inner = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
    optimizer = lc.DiLoCoX(inner, 2, mode="sync", codec=None, outer_lr=1, outer_momentum=0)
    losses, calls = [], []
    for _ in range(4):

        def closure():
            calls.append(1)
            optimizer.zero_grad()
            loss = ddp_model.loss_of(model, r.rank, 0)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    assert len(calls) > 4, "LBFGS asked more than once a step"
    assert losses[-1] < losses[0]
    assert _same_everywhere(ddp_model.weights(model)) and optimizer.report["outer_steps"] == 2


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.on("pair", group={})
def test_buffers_are_averaged_where_asked(r, average):
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(ddp_model.WIDTH, 16), nn.BatchNorm1d(16), nn.Linear(16, 7))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = lc.DiLoCoX(inner, 2, mode="sync", model=model, average_buffers=average)
    for step in range(3):
        ddp_model.loss_of(model, r.rank, step).backward()
        optimizer.step()
    model(ddp_model.batch(r.rank, 3)[0])  # moves the buffers: what a last inner step of the interval leaves
    norm = model[1]
    mine = {"mean": norm.running_mean.clone(), "var": norm.running_var.clone()}
    everyones = gathered(mine)
    optimizer.step()
    after = {"mean": norm.running_mean, "var": norm.running_var}
    assert norm.num_batches_tracked == 4, "what is no floating point stays each rank's own"
    if not average:
        assert not differing(after, mine) and not _same_everywhere(after)
        return
    assert _same_everywhere(after)
    for name, value in after.items():
        torch.testing.assert_close(value, torch.stack([every[name] for every in everyones]).mean(0))


@pytest.mark.on("pair", group={})
def test_steps_at_a_rate_of_zero_count(r):
    """A schedule that begins and ends at 0, as transformers' linear one: outer steps are due by calls."""
    model, optimizer = _make(mode="sync")
    total = 4 * EVERY
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / EVERY, max(0, total - 2 - step)))
    _steps(model, optimizer, r.rank, range(total), scheduler)
    assert optimizer.param_groups[0]["lr"] == 0
    assert (optimizer.steps, optimizer.report["outer_steps"]) == (total, 4)


class _ScheduleFree(torch.optim.SGD):
    """A stand-in for optimizers with two modes, which a trainer asks for by hasattr."""

    training = True

    def train(self):
        self.training = True

    def eval(self):
        self.training = False


@pytest.mark.on("pair", group={})
def test_what_the_inner_optimizer_has_beyond_torchs_is_passed_on(r):
    model = ddp_model.Net()
    inner = _ScheduleFree(model.parameters(), lr=1e-2)
    optimizer = lc.DiLoCoX(inner, EVERY, model=model)
    optimizer.eval()
    assert not inner.training and not optimizer.training
    optimizer.train()
    assert inner.training
    _, plain = _make()
    assert not hasattr(plain, "train") and not hasattr(plain, "eval")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = optimizer.nothing
    assert model.up.weight not in optimizer.state and optimizer.state.get(model.up.weight, 3) == 3
    assert optimizer.state and not inner.state and list(optimizer.state) == []


@pytest.mark.on("pair", group={})
def test_parameters_that_the_optimizer_lacks_are_said(r):
    model = ddp_model.Net()
    with kept_log() as lines:
        for frozen in (False, True):
            model.down.requires_grad_(not frozen)
            optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if not n.startswith("down")], lr=0.1)
            lc.DiLoCoX(optimizer, EVERY, model=model)
    (line,) = [line for line in lines if "neither trained nor averaged" in line]
    assert "got one without down.weight, down.bias: they are" in line
