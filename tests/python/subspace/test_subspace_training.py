"""Training with the wire and without it: the same weights and losses, through clipping and steps of the subspace."""

import logging

import pytest
import stages_case
import subspace_case as case
import test_subspace_pipeline as pipelines
import torch
import torch.distributed as dist
from torch import nn

import torch_lowcomm as lc
from torch_lowcomm.subspace.basis import Basis
from torch_lowcomm.subspace.grassmann import GradientSum, turned

STEPS, LR, CLIP, VOCABULARY = 20, 1e-2, 1.0, 128


def _batch(step):
    """Sequences that count on from a token, which can be learned."""
    first = case.ids(batch=2 * pipelines.MICRO, time=1, seed=step)
    text = (first + torch.arange(case.TIME + 1)) % VOCABULARY
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def _one_process(layers, stages, turn_every):
    """Losses and weights of the decoder in one piece."""
    model = lc.subspace.constrain(case.gpt(layers=layers), case.RANK)
    optimizer = lc.SubspaceAdamW(model, lr=LR)
    seen = GradientSum()
    case.watch_input(seen, model.blocks[layers - layers // stages])
    losses = []
    for step in range(STEPS):
        x, y = _batch(step)
        optimizer.zero_grad()
        total = 0.0
        for part, target in zip(x.chunk(pipelines.MICRO), y.chunk(pipelines.MICRO), strict=True):
            loss = model(part, target) / pipelines.MICRO
            loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.clip_grad_norm(CLIP)
        optimizer.step()
        if turn_every and (step + 1) % turn_every == 0:
            case.turn(model, optimizer, seen)
    return losses, model.state_dict(), model.subspace_basis


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layers", "turn_every"),
    [("1F1B", 4, 10), ("Interleaved1F1B", 8, 0)],
    ids=["steps of the subspace", "interleaved"],
)
@pytest.mark.on("quad", group={}, timeout=240)
def test_four_processes_train_as_one(r, name, layers, turn_every):
    schedule, stages = pipelines.pipeline(r, name, layers, torch.float64)
    modules = nn.ModuleList(stage.submod for stage in stages)
    optimizer = lc.SubspaceAdamW(modules, lr=LR)
    subspace = lc.subspace.Grassmann(stages, optimizer, every=turn_every) if turn_every else None
    last, means = any(s.is_last for s in stages), []
    for step in range(STEPS):
        x, y = _batch(step)
        optimizer.zero_grad()
        losses = []
        lc.pipeline.step(schedule, x, target=y, ids=x, losses=losses)
        means.append(torch.stack(losses).mean().item() if last else 0.0)
        optimizer.clip_grad_norm(CLIP, stages=dist.group.WORLD)
        optimizer.step()
        if subspace is not None:
            assert subspace.step() == ((step + 1) % turn_every == 0)
    count = r.size * stages_case.SCHEDULES[name][1]
    want, weights, basis = _one_process(layers, count, turn_every)
    for stage in stages:
        for key, value in stage.submod.named_parameters():
            off = case.apart(value, weights[key])
            assert off < 1e-9, (key, off)
        own = stage.submod.subspace_basis
        assert own.version == basis.version == (STEPS // turn_every if turn_every else 0)
        assert (own.vectors - basis.vectors).abs().max() < 1e-9
    if last:
        off = max(abs(a - b) for a, b in zip(means, want, strict=True))
        assert off < 1e-12, off
        assert want[-1] < want[0] - 0.3  # it learns


def test_a_norm_of_one_stage_is_told(caplog):
    """Without the group of all stages each one clips by a norm of its own; a rank that has them all does not."""
    stages, ids = case.cuts(case.constrained(torch.float32), 2), case.ids()
    case.chain(stages, ids).square().mean().backward()
    one, all_of_them = lc.SubspaceAdamW(stages[1]), lc.SubspaceAdamW(nn.ModuleList(stages))
    with caplog.at_level(logging.WARNING, logger="torch_lowcomm.subspace"):
        for _ in range(2):
            all_of_them.clip_grad_norm(1.0)
            assert caplog.messages == []
        for _ in range(2):
            one.clip_grad_norm(1.0)
    (told,) = caplog.messages
    assert "expected stages=, the group of all 2 stages, got None: the norm is that of stage 1 alone" in told


def test_a_step_of_the_subspace_follows_the_gradients():
    """Gradients of one direction outside S: the basis turns towards it, and stays orthonormal."""
    basis = Basis(16, 3, seed=1)
    outside = torch.randn(16, dtype=torch.float64)
    outside -= basis.project(outside)
    inside = basis.vectors[0]
    seen = GradientSum()
    seen.add((outside / outside.norm() + inside).expand(5, 2, 16))
    new = turned(basis.vectors, seen.total, 1.0)
    torch.testing.assert_close(new @ new.t(), torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-12)
    before, after = (basis.vectors @ outside).norm(), (new @ outside).norm()
    assert before < 1e-12 < 0.1 * outside.norm() < after
    # A gradient that lies in S moves nothing.
    seen = GradientSum()
    seen.add(inside.expand(4, 16))
    torch.testing.assert_close(turned(basis.vectors, seen.total, 1.0), basis.vectors, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="expected finite gradients"):
        turned(basis.vectors, seen.total * float("nan"), 1.0)


def test_frozen_weights_follow_a_turned_subspace():
    """Biases of constrained projections are frozen, and lie in the new subspace as everything else."""
    model = case.gpt()
    for block in model.blocks:
        block.down.bias = nn.Parameter(torch.randn(case.WIDTH, dtype=torch.float64), requires_grad=False)
    model = lc.subspace.constrain(model, case.RANK)
    model.blocks[1].attention.out.weight.requires_grad_(False)
    optimizer = lc.SubspaceAdamW(model, lr=LR)
    ids = case.ids()
    optimizer.zero_grad()
    model(ids, ids).backward()
    optimizer.step()
    basis = model.subspace_basis
    new = Basis(case.WIDTH, case.RANK, seed=8).vectors
    optimizer.change_basis(basis.vectors.clone(), new)
    basis.change(new)
    assert not lc.subspace.check(model)
    assert max(optimizer.distances().values()) < 1e-12
    assert case.apart(case.chain(case.cuts(model, 3), ids), case.chain(case.cuts(model, 1), ids)) < 1e-12


def test_what_a_step_of_the_subspace_refuses():
    """When it is made, and not at the end of the first interval."""
    model = case.constrained()
    stages = case.cuts(model, 2)
    optimizer = lc.SubspaceAdamW(nn.ModuleList(stages))
    with pytest.raises(TypeError, match="expected an optimizer with change_basis, lc.SubspaceAdamW, got AdamW"):
        lc.subspace.Grassmann(stages, torch.optim.AdamW(model.parameters()))
    for wrong in ([model], [], case.cuts(case.gpt(), 2, boundary=lc.subspace.Projection(4))):
        with pytest.raises(ValueError, match="Grassmann: expected stages that lc.subspace.cut made of a constrained"):
            lc.subspace.Grassmann(wrong, optimizer)
    with pytest.raises(ValueError, match="Grassmann: expected an exact boundary before the last of two stages"):
        lc.subspace.Grassmann(case.cuts(model, 2, coefficients="bf16"), optimizer)
    with pytest.raises(ValueError, match="every: expected 1 or more, got 0"):
        lc.subspace.Grassmann(stages, optimizer, every=0)
