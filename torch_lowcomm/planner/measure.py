"""Measures a training on this machine: a step that sends nothing, and codecs on the model's own gradients."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torch_lowcomm.codec import codec as codec_of
from torch_lowcomm.planner.training import Coding, Training

INT4, INT8, GAUSS2, GAUSS4 = "sym4:bucket=128", "sym8:bucket=128", "gauss2", "gauss4:gain=1.011"
W8, W6, W4, G8, G4 = (f"{name}:bucket=1024" for name in ("minmax8", "minmax6", "minmax4", "qsgd8", "qsgd4"))
CODECS = (INT4, INT8, GAUSS2, GAUSS4, W8, W6, W4, G8, G4)  # of the ways that a plan compares
STEPS, SAMPLE = 20, 1 << 22  # steps; elements of gradients that codecs are tried on
UPDATE_NS = 2.0  # a parameter: torch's AdamW on one core
Loss = Callable[[nn.Module, Any], torch.Tensor]


def measure(model: nn.Module, batch: Any, *, loss: Loss | None = None, steps: int = STEPS) -> Training:
    """Runs forward and backward passes of a model on a batch, and leaves its weights, buffers and gradients as they were.

    Args:
        model: Takes the batch: `model(*batch)` of a tuple or list, `model(**batch)` of a dict, else `model(batch)`.
        batch: Of one rank. The first tensor's elements count as tokens where it holds integers, else its rows do.
        loss: Makes a scalar of model and batch; None where the model's output is one, or has it as `.loss`, or first.
        steps: Passes whose median counts, after two that do not.

    Raises:
        ValueError: The output is no scalar, or no gradient is finite.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kept = [parameter.grad for parameter in trained]
    times: list[tuple[float, float]] = []
    with torch.random.fork_rng():
        for _ in range(steps + 2):
            for parameter in trained:
                parameter.grad = None
            start = time.perf_counter()
            value = _scalar(model, batch) if loss is None else loss(model, batch)
            forward = time.perf_counter()
            value.backward()
            times.append((forward - start, time.perf_counter() - forward))
    found = {id(p): p.grad for p in trained if p.grad is not None}
    for parameter, gradient in zip(trained, kept, strict=True):
        parameter.grad = gradient
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    if not found:
        raise ValueError("plan: model: expected parameters with gradients, got none")
    forward_s, backward_s = (statistics.median(part) for part in zip(*times[2:], strict=True))
    blocks, count = blocks_of(model), sum(p.numel() for p in trained)
    return Training(
        parameters=count,
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=UPDATE_NS * 1e-9 * count,
        tokens=_tokens(batch),
        width=_width(blocks),
        layers=max(len(blocks), 1),
        matrices=[(p.shape[0], p[0].numel()) for p in trained if p.dim() > 1],
        codings=codings(torch.cat([g.detach().flatten().float() for g in found.values()])[:SAMPLE]),
    )


def codings(sample: torch.Tensor | None = None, codecs: Sequence[str] = CODECS) -> Mapping[str, Coding]:
    """Tries codecs on numbers; without numbers on N(0, 1), and then gives no errors."""
    x = torch.randn(SAMPLE) if sample is None else sample.cpu()
    if not x.isfinite().all():
        raise ValueError("plan: model: expected finite gradients, got NaN or infinity")
    found = {}
    for text in codecs:
        codec = codec_of(text)
        codec.roundtrip(x)  # memory is touched for the first time
        start = time.perf_counter()
        data = codec.encode(x)
        decoded = codec.decode(data, x.numel())
        ns = (time.perf_counter() - start) / x.numel() * 1e9
        error = None if sample is None else float((decoded.flatten() - x).norm() / x.norm().clamp(min=1e-30))
        found[text] = Coding(8 * data.numel() / x.numel(), ns, error)
    return found


def blocks_of(model: nn.Module) -> Sequence[nn.Module]:
    """The list of modules that has the most parameters: a decoder's blocks. Empty where there is no list."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m) > 1]
    return list(max(lists, key=lambda m: sum(p.numel() for p in m.parameters()), default=[]))


def _scalar(model: nn.Module, batch: Any) -> torch.Tensor:
    named = isinstance(batch, Mapping)
    several = batch if isinstance(batch, tuple | list) else [batch]
    output = model(**batch) if named else model(*several)
    value = getattr(output, "loss", output)
    value = value[0] if isinstance(value, tuple | list) else value
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(
            f"plan: model: expected a scalar loss of the batch, got {shape}: pass loss=lambda model, batch: …"
        )
    return value


def _tokens(batch: Any) -> int:
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else [batch]
    first = next((value for value in values if isinstance(value, torch.Tensor)), None)
    if first is None or first.dim() == 0:
        return 0
    return len(first) if first.is_floating_point() else first.numel()


def _width(blocks: Sequence[nn.Module]) -> int:
    """The commonest length of the vectors in blocks: norms have the residual stream's width; 0 where there is none."""
    lengths = Counter(p.numel() for block in blocks for p in block.parameters() if p.dim() == 1)
    return lengths.most_common(1)[0][0] if lengths else 0
