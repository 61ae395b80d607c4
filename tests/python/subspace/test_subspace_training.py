"""Training with the wire and without it: the same weights and losses, through clipping."""

import logging

import pytest
import subspace_case as case
import test_subspace_pipeline as pipelines
import torch
import torch.distributed as dist
from torch import nn

import torch_lowcomm as lc

STEPS, LR, CLIP, VOCABULARY = 20, 1e-2, 1.0, 128


def _batch(step):
    """Sequences that count on from a token, which can be learned."""
    first = case.ids(batch=2 * pipelines.MICRO, time=1, seed=step)
    text = (first + torch.arange(case.TIME + 1)) % VOCABULARY
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def _one_process(layers):
    """Losses and weights of the decoder in one piece."""
    model = lc.subspace.constrain(case.gpt(layers=layers), case.RANK)
    optimizer = lc.SubspaceAdamW(model, lr=LR)
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
    return losses, model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layers"), [("1F1B", 4), ("Interleaved1F1B", 8)])
@pytest.mark.on("quad", group={}, timeout=240)
def test_four_processes_train_as_one(r, name, layers):
    schedule, stages = pipelines.pipeline(r, name, layers, torch.float64)
    modules = nn.ModuleList(stage.submod for stage in stages)
    optimizer = lc.SubspaceAdamW(modules, lr=LR)
    last, means = any(s.is_last for s in stages), []
    for step in range(STEPS):
        x, y = _batch(step)
        optimizer.zero_grad()
        losses = []
        lc.pipeline.step(schedule, x, target=y, ids=x, losses=losses)
        means.append(torch.stack(losses).mean().item() if last else 0.0)
        optimizer.clip_grad_norm(CLIP, stages=dist.group.WORLD)
        optimizer.step()
    want, weights = _one_process(layers)
    for stage in stages:
        for key, value in stage.submod.named_parameters():
            off = case.apart(value, weights[key])
            assert off < 1e-9, (key, off)
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


def test_frozen_weights_are_in_the_subspace_too():
    """Biases of constrained projections are frozen, and lie in the subspace as everything else."""
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
    assert not lc.subspace.check(model)
    assert max(optimizer.distances().values()) < 1e-12
    assert case.apart(case.chain(case.cuts(model, 3), ids), case.chain(case.cuts(model, 1), ids)) < 1e-12
