"""lc.DiLoCoX's error feedback: the residuals of the ranks next to their recursion in float64, with and without a decay."""

import ddp_model
import pytest
import torch
from diloco_model import differing
from stages_case import gathered

import torch_lowcomm as lc

EVERY, OUTER = 2, 5
CASES = {
    "topk": {"codec": "topk:chunk=256,keep=16,values=sym2"},
    "factors": {"codec": "sym4:bucket=64", "rank": 3},
    "8 bits": {"codec": "sym4:bucket=64", "residual_dtype": "int8"},
    "factors, 8 bits": {"codec": "sym4:bucket=64", "rank": 3, "residual_dtype": "int8"},
}


def _weights(model):
    return {name: tensor.double() for name, tensor in ddp_model.weights(model).items()}


def _residuals(model, optimizer):
    """The residuals that this rank adds to its next pseudo-gradients, in float64."""
    found = {}
    for name, parameter in model.named_parameters():
        kept = optimizer._outer.state()[f"own.{name}.residual"]
        if kept.dtype == torch.uint8:
            kept = lc.codec("sym8:bucket=512").decode(kept, parameter.numel())
        found[name] = kept.double().view_as(parameter)
    return found


@pytest.mark.parametrize("share", [True, 0.5], ids=str)
@pytest.mark.parametrize("mode", ["sync", "continue"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.on("pair", group={})
def test_residuals_follow_their_recursion(r, case, mode, share):
    """After every outer step e = β·(e + δ − sent), summed over the ranks; the outer parameters move by what was sent."""
    torch.manual_seed(7)
    model = ddp_model.Net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"mode": mode, "outer_lr": 1, "outer_momentum": 0, "error_feedback": share} | CASES[case]
    optimizer = lc.DiLoCoX(inner, EVERY, model=model, **options)
    trained, outer, moved = {}, [_weights(model)], []
    inner.register_step_post_hook(lambda *_: trained.update(_weights(model)))
    for step in range(EVERY * OUTER):
        before = _weights(model)
        ddp_model.train(model, r.rank, 1, first=step, optimizer=optimizer, spare=True)
        steps = {name: before[name] - trained[name] for name in before}
        if step % EVERY == 0:
            moved.append(steps)
            continue
        moved[-1] = {name: moved[-1][name] + steps[name] for name in steps}
        with optimizer.outer_parameters():
            outer.append(_weights(model))
    optimizer.finish()
    outer.append(_weights(model))
    if mode == "continue":  # an average takes an interval: the first outer step has none
        assert not differing(outer.pop(0), outer[0])
    found, moved = gathered(_residuals(model, optimizer)), gathered(moved)
    for name in outer[0]:
        residual = torch.zeros_like(outer[0][name])
        for t in range(OUTER):
            sent = r.size * (outer[t][name] - outer[t + 1][name])
            residual = share * (residual + sum(of_rank[t][name] for of_rank in moved) - sent)
        off = (sum(of_rank[name] for of_rank in found) - residual).abs().max()
        assert off <= (0.1 if "8 bits" in case else 1e-4) * residual.abs().max() + 1e-6, name
