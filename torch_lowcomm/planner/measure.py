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
STEPS, SAMPLE = 20, 1 << 22  # passes whose median counts; elements of gradients that codecs are tried on
UPDATE_NS = 2.0  # a parameter: torch's AdamW on one core
Loss = Callable[[nn.Module, Any], torch.Tensor]


def measure(model: nn.Module, batch: Any, *, loss: Loss | None = None) -> Training:
    """Runs forward and backward passes of a model on a CPU, and leaves its weights, buffers and gradients as they were.

    Args:
        model: Takes the batch: `model(*batch)` of a tuple or list, `model(**batch)` of a dict, else `model(batch)`.
        batch: Of one rank. Its first tensor's elements count as tokens where it holds integers; else pipelines are not planned.
        loss: Makes a scalar of model and batch; None where the model's output is one, or has it as `.loss`, or first.

    Raises:
        ValueError: The model trains nothing or is not on a CPU, the output is no scalar, or a gradient is not finite.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained or any(p.device.type != "cpu" for p in trained):
        raise ValueError("plan: model: expected parameters that are trained, on a CPU, got others: pass a Training")
    buffers = [(m, name, b, b.clone()) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    kept = [parameter.grad for parameter in trained]
    times: list[tuple[float, float]] = []
    try:
        with torch.random.fork_rng():
            for _ in range(STEPS + 2):
                for parameter in trained:
                    parameter.grad = None
                start = time.perf_counter()
                value = _scalar(model, batch, loss)
                forward = time.perf_counter()
                value.backward()
                times.append((forward - start, time.perf_counter() - forward))
        found = [p.grad for p in trained if p.grad is not None]
    finally:
        for parameter, gradient in zip(trained, kept, strict=True):
            parameter.grad = gradient
        for module, name, buffer, before in buffers:
            module._buffers[name] = buffer.copy_(before)
    forward_s, backward_s = (statistics.median(part) for part in zip(*times[2:], strict=True))
    (path, blocks), count = blocks_of(model), sum(p.numel() for p in trained)
    every = -(-count // SAMPLE)  # a sample from all gradients alike
    sample = [g.detach().flatten()[::every].float() for g in found if not g.is_sparse]
    return Training(
        parameters=count,
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=UPDATE_NS * 1e-9 * count,
        tokens=_tokens(batch),
        width=_width(blocks),
        layers=max(len(blocks), 1),
        matrices=[(p.shape[0], p[0].numel()) for p in trained if p.dim() > 1],
        codings=codings(torch.cat(sample) if sample else None),
        bits=8 * statistics.mean(p.element_size() for p in trained),
        blocks=path and f"model.{path}",
        unused=len(found) < len(trained),
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


def blocks_of(model: nn.Module) -> tuple[str, Sequence[nn.Module]]:
    """The name and the modules of the list of one type with the most parameters: a decoder's blocks; "" without a list."""
    lists = [(name, list(m)) for name, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    alike = [(name, m) for name, m in lists if name and len(m) > 1 and len({type(one) for one in m}) == 1]
    return max(alike, key=lambda found: sum(p.numel() for one in found[1] for p in one.parameters()), default=("", []))


def _scalar(model: nn.Module, batch: Any, loss: Loss | None) -> torch.Tensor:
    several = batch if isinstance(batch, tuple | list) else [batch]
    call = loss or (lambda model, batch: model(**batch) if isinstance(batch, Mapping) else model(*several))
    output = call(model, batch)
    value = getattr(output, "loss", output)
    value = value[0] if isinstance(value, tuple | list) else value
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(f"plan: model: expected a scalar loss of the batch, got {shape}: pass loss=")
    return value


def _tokens(batch: Any) -> int:
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else [batch]
    first = next((value for value in values if isinstance(value, torch.Tensor)), None)
    return 0 if first is None or first.is_floating_point() else first.numel()  # of activations nothing is known


def _width(blocks: Sequence[nn.Module]) -> int:
    """The commonest length of the vectors in blocks: norms have the residual stream's width; 0 where there is none."""
    lengths = Counter(p.numel() for block in blocks for p in block.parameters() if p.dim() == 1)
    return lengths.most_common(1)[0][0] if lengths else 0
