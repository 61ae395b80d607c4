"""lc.SubspaceAdamW in one process: the formulas, drift, torch's contract of optimizers, another U, mistakes."""

import copy
import logging
import math

import pytest
import subspace_adam_model as small
import subspace_case as case
import torch
from diloco_model import differing
from subspace_adam_model import backward, fresh, train
from torch import nn

import torch_lowcomm as lc

SETTINGS = {"lr": 3e-3, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}


def _weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _apart(a, b):
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("variant", ["rows", "project_all"])
def test_follows_the_formulas(variant, clip):
    model, by_hand = fresh(), fresh()
    optimizer = lc.SubspaceAdamW(model, variant=variant, **SETTINGS)
    reference = small.Reference(by_hand, small.vectors(), variant=variant, **SETTINGS)
    for step in range(20):
        assert abs(backward(model, step) - backward(by_hand, step)) < 1e-12
        if clip is not None:
            norm = optimizer.clip_grad_norm(clip)
        optimizer.step()
        expected = reference.step(clip)
        if clip is not None:
            assert abs(norm.item() - expected) < 1e-12 * expected and expected > clip
        optimizer.zero_grad()
        by_hand.zero_grad()
    assert _apart(_weights(model), _weights(by_hand)) < 1e-12
    shape = (small.RANK, small.HIDDEN) if variant == "rows" else (small.WIDTH, small.HIDDEN)
    assert optimizer.state[model.blocks[0].down.weight]["exp_avg"].shape == shape
    assert len(optimizer.distances()) == 7 and max(optimizer.distances().values()) < 1e-14


def test_plain_parameters_are_torchs():
    """Bits of torch's fused AdamW; groups, a scheduler, a closure and missing gradients as torch has them."""

    def groups(model):
        matrices = [(name, p) for name, p in model.named_parameters() if p.ndim == 2]
        return [
            {"params": matrices, "weight_decay": 0.2},
            {"params": [(n, p) for n, p in model.named_parameters() if p.ndim == 1], "lr": 1e-2, "betas": (0.8, 0.95)},
        ]

    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(5, 300), nn.Tanh(), nn.Linear(300, 3), nn.Linear(3, 2))
    theirs = copy.deepcopy(model)
    pairs = [
        (model, lc.SubspaceAdamW(groups(model), module=model, **SETTINGS)),
        (theirs, torch.optim.AdamW(groups(theirs), fused=True, **SETTINGS)),
    ]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 4) for _, optimizer in pairs]
    for step in range(12):
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
        for net, optimizer in pairs:

            def closure(net=net, x=x):
                loss = net[:3](x).square().mean()  # the last layer has no gradient
                loss.backward()
                return loss

            assert optimizer.step(closure).item() > 0
            optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    assert not differing(_weights(model), _weights(theirs))
    assert pairs[0][1].state[model[3].weight]["step"] == 0 and pairs[0][1].state[model[0].weight]["step"] == 12


def test_bfloat16_keeps_what_rounding_takes():
    """Weights of bfloat16, with what was rounded off them, follow those of float32 and stay in S."""
    model, wide = fresh(torch.bfloat16), fresh(torch.float32)
    optimizer, other = lc.SubspaceAdamW(model, **SETTINGS), lc.SubspaceAdamW(wide, **SETTINGS)
    with torch.no_grad():
        for p, q in zip(model.parameters(), wide.parameters(), strict=True):
            optimizer.state[p]["rounding"].copy_(q - p.float())
    for step in range(50):
        backward(wide, step)
        for p, q in zip(model.parameters(), wide.parameters(), strict=True):
            p.grad = q.grad.bfloat16()
            q.grad = p.grad.float()
        optimizer.step()
        other.step()
        wide.zero_grad()
    for p, q in zip(model.parameters(), wide.parameters(), strict=True):
        torch.testing.assert_close(p.float() + optimizer.state[p]["rounding"], q, rtol=1e-5, atol=1e-6)
        assert optimizer.state[p]["exp_avg"].dtype == torch.float32
    whole = model.blocks[1].down.weight.float() + optimizer.state[model.blocks[1].down.weight]["rounding"]
    assert (whole - small.projected(whole, small.vectors(), False)).norm() < 1e-5 * whole.norm()


def test_gradient_scaler():
    model, plain = fresh(torch.float32), fresh(torch.float32)
    optimizer, other = lc.SubspaceAdamW(model, **SETTINGS), lc.SubspaceAdamW(plain, **SETTINGS)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(6):
        backward(model, step, scaler.scale)
        backward(plain, step)
        if step % 2:
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm(0.1)
            other.clip_grad_norm(0.1)
        if step == 4:
            model.head.weight.grad[0, 0] = math.inf
        else:
            other.step()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        other.zero_grad()
    assert scaler.get_scale() == 512 and _apart(_weights(model), _weights(plain)) < 1e-6
    # Scaled gradients have another norm. The scaler may go on after the error.
    backward(model, 0, scaler.scale)
    optimizer.clip_grad_norm(0.1)
    with pytest.raises(ValueError, match="expected unscaled gradients in clip_grad_norm"):
        scaler.step(optimizer)
    assert not hasattr(optimizer, "grad_scale")


def test_gradients_that_change_after_clipping():
    model, same = fresh(), fresh()
    optimizer, other = lc.SubspaceAdamW(model, **SETTINGS), lc.SubspaceAdamW(same, **SETTINGS)
    for change in (
        lambda p: p.grad.mul_(2),
        lambda p: setattr(p, "grad", p.grad.clone()),
        lambda p: setattr(p, "grad", None),
    ):
        backward(model, 0)
        optimizer.clip_grad_norm(0.1)
        change(model.blocks[0].out.weight)
        before = _weights(model)
        with pytest.raises(ValueError, match="expected the gradients that clip_grad_norm saw, got others"):
            optimizer.step()
        assert not differing(_weights(model), before)
        optimizer.zero_grad()
    for net, of in ((model, optimizer), (same, other)):
        backward(net, 1)
        of.clip_grad_norm(0.1 if of is other else 3.0)
        if of is optimizer:
            net.head.bias.grad.add_(0)
            of.clip_grad_norm(0.1)  # the last one counts, of gradients as they are
        of.step()
    assert not differing(_weights(model), _weights(same))


def test_another_basis():
    """A model with another seed's U in its basis is not trained, and does not take moments in that U."""
    other = small.Decoder(small.Basis(small.WIDTH, small.RANK, seed=1))
    theirs = lc.SubspaceAdamW(other, **SETTINGS)
    train(other, theirs, range(2))
    model, same = fresh(), fresh()
    optimizer, one = lc.SubspaceAdamW(model, **SETTINGS), lc.SubspaceAdamW(same, **SETTINGS)
    for net, of in ((model, optimizer), (same, one)):
        train(net, of, range(2))
    before, state = _weights(model), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(
        ValueError, match="basis_checksum: expected the state of a decoder with basis_checksum=[0-9]+, got"
    ):
        optimizer.load_state_dict(theirs.state_dict())
    # In place, as a distributed checkpoint is loaded.
    model.embedding.subspace_basis.vectors.copy_(small.vectors(seed=1))
    backward(model, 2)
    for act in (optimizer.step, optimizer.distances, lambda: optimizer.clip_grad_norm(1.0)):
        with pytest.raises(
            ValueError, match="expected U of checksum 0x[0-9a-f]{8}, which .* got a basis of checksum 0x"
        ):
            act()
    assert not differing(_weights(model), before) and not differing(optimizer.state_dict(), state)
    model.embedding.subspace_basis.vectors.copy_(small.vectors())
    optimizer.zero_grad()
    for net, of in ((model, optimizer), (same, one)):
        train(net, of, range(2, 4), clip=0.1)
    assert not differing(_weights(model), _weights(same))


def test_a_weight_that_was_moved_out_of_the_subspace():
    model = fresh(torch.float32)
    with torch.no_grad():
        model.blocks[1].out.weight.add_(0.1 * torch.randn(small.WIDTH, small.WIDTH))
    with pytest.raises(ValueError, match=r"blocks.1.out.weight: expected a weight in the subspace, .* got [0-9.e-]+"):
        lc.SubspaceAdamW(model)
    model = fresh(torch.float32)
    optimizer = lc.SubspaceAdamW(model, check_every=4, **SETTINGS)
    train(model, optimizer, range(2))
    with torch.no_grad():
        model.embedding.weight.mul_(2)  # stays in S
        model.blocks[0].down.weight[0].mul_(1.5)
    train(model, optimizer, range(2, 4))
    before = _weights(model)
    with pytest.raises(ValueError, match=r"blocks.0.down.weight: expected a weight in the subspace"):
        train(model, optimizer, range(4, 5))
    assert not differing(_weights(model), before)


def test_mistakes():
    model = fresh()
    for options, error, said in [
        ({"variant": "reparam"}, ValueError, r"variant: expected one of rows, project_all \(lc.subspace.reparam"),
        ({"check_every": -1}, ValueError, "check_every: expected 0 or more, got -1"),
        ({"check_every": 0.5}, TypeError, "check_every: expected an integer, got 0.5"),
        ({"lr": -1.0}, ValueError, "lr: expected a finite number of 0 or more, got -1.0"),
        ({"betas": (0.9, 1.0)}, ValueError, r"betas: expected two numbers in \[0, 1\), got"),
    ]:
        with pytest.raises(error, match=said):
            lc.SubspaceAdamW(model, **options)
    with pytest.raises(ValueError, match="expected a module, or parameters of module=.* got a parameter of another"):
        lc.SubspaceAdamW(list(model.named_parameters()))
    optimizer = lc.SubspaceAdamW(model, **SETTINGS)
    for norm in (-1.0, math.nan):
        with pytest.raises(ValueError, match="max_norm: expected 0 or more"):
            optimizer.clip_grad_norm(norm)
    backward(model, 0)
    model.head.weight.grad[0, 0] = math.nan
    with pytest.raises(ValueError, match="expected gradients with a finite norm, got nan over all stages"):
        optimizer.clip_grad_norm(1.0, error_if_nonfinite=True)
    model.head.weight.grad = torch.zeros(small.VOCABULARY, small.WIDTH, dtype=torch.float64).to_sparse()
    with pytest.raises(TypeError, match="head.weight: expected a dense gradient, got one of torch.sparse_coo"):
        optimizer.step()
    other = fresh(seed=3)
    for block in other.blocks:
        small.mark(block.out, "attention_output", small.Basis(small.WIDTH, small.RANK, seed=1))
    with pytest.raises(ValueError, match="expected one basis for all weights, got .*seed 0, .* and .*seed 1"):
        lc.SubspaceAdamW(other)
    other = fresh(seed=3)
    object.__setattr__(other.blocks[0].down, "subspace_role", "sideways")
    with pytest.raises(ValueError, match="subspace_role: expected one of attention_output, .* got 'sideways'"):
        lc.SubspaceAdamW(other)
    with pytest.raises(ValueError, match="load: embedding.weight: expected 'exp_avg' in the state, got none"):
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
    frozen = fresh()
    frozen.head.bias.requires_grad_(False)
    optimizer = lc.SubspaceAdamW(frozen, **SETTINGS)
    frozen.head.bias.requires_grad_()
    backward(frozen, 0)
    with pytest.raises(ValueError, match="head.bias: expected gradients of the .* got one of another"):
        optimizer.step()


def test_groups_of_modules():
    """Parts of a model with learning rates of their own."""
    model, whole = fresh(), fresh()
    groups = [
        {"params": model.head},  # of which the optimizer learns no basis
        {"params": model.embedding, "lr": 0.0, "weight_decay": 0.0},
        {"params": model.blocks},
    ]
    optimizer = lc.SubspaceAdamW(groups, **SETTINGS)
    before = model.embedding.weight.clone()
    backward(model, 0)
    backward(whole, 0)
    optimizer.step()
    lc.SubspaceAdamW(whole, **SETTINGS).step()
    assert torch.equal(model.embedding.weight, before)
    for mine, other in ((model.blocks, whole.blocks), (model.head, whole.head)):
        assert not differing(_weights(mine), _weights(other))
    basis = model.embedding.subspace_basis
    assert {group["basis_checksum"] for group in optimizer.param_groups} == {basis.checksum}


def test_a_model_that_nothing_constrained_is_warned_of(caplog):
    """It is trained by AdamW. A stage whose only blocks are free belongs to a constrained model."""
    with caplog.at_level(logging.WARNING, "torch_lowcomm"):
        lc.SubspaceAdamW(fresh())
        lc.SubspaceAdamW(case.cuts(case.constrained(torch.float32), 2)[1])
        assert not caplog.messages
        lc.SubspaceAdamW(nn.Linear(8, 8), lr=1e-3)
    (said,) = caplog.messages
    assert "expected a model that lc.subspace.constrain or cut has constrained, got one without" in said
