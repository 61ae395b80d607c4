"""Every quantizer of QSDP through fully_shard: equal weights on all ranks, errors within the codec's law, the page's bytes."""

import zlib

import pytest
import torch
import torch.distributed as dist
from collective_cases import bits
from format_reader.filling import plan, read_layout
from format_reader.spec import parse
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_lowcomm as lc

ROWS, COLUMNS = 96, 200
CHUNK_BYTES = 1 << 17

# Weights, gradients: the paper's pairs of bits, buckets of all sizes and none, every rounding.
PAIRS = [
    ("minmax8:bucket=1024", "qsgd8:bucket=1024"),
    ("minmax6:bucket=128", "qsgd4:bucket=128"),
    ("minmax5:bucket=512", "qsgd4:bucket=512"),
    ("minmax4:bucket=4096", "qsgd4:bucket=65536"),
    ("minmax4:bucket=1024", "none"),
    ("minmax8:bucket=tensor", "qsgd8:bucket=tensor"),
    ("minmax2:bucket=64", "qsgd2:bucket=64"),
    ("lattice8:bucket=1024", "lattice8:bucket=1024"),
    ("lattice4:bucket=256", "qsgd4:bucket=256"),
    ("qsgd6:bucket=2048", "minmax4:bucket=1024"),
    ("levels4:bucket=1024", "levels3:bucket=512"),
    ("levels8:bucket=tensor", "levels1:bucket=64"),
    ("none", "qsgd4:bucket=1024"),
]
# Of a step: the largest error of an element (the page's laws); levels are even until they are learned.
STEPS = {"minmax": 0.5002, "levels": 0.5002, "lattice": 0.5002, "qsgd": 1.0}


class _Dot(nn.Module):
    """A weight whose gradient is what it is multiplied with."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(5)))
        self.bias = nn.Parameter(torch.ones(COLUMNS))

    def forward(self, gradient):
        return (self.weight * gradient).sum() + self.bias.sum()


def _allowed(text, x):
    """The largest error of each of a flat tensor's elements under a codec."""
    spec = parse(text)
    if spec.name == "none":
        return torch.zeros_like(x)
    size = spec.bucket or x.numel()
    allowed = torch.empty_like(x)
    for first in range(0, x.numel(), size):
        bucket = x[first : first + size]
        step = (bucket.max() - bucket.min()) / (2**spec.bits - 1)
        largest = bucket.abs().max()
        allowed[first : first + size] = STEPS[spec.name] * step + 4 * (largest.nextafter(2 * largest) - largest)
    return allowed


def _message_bytes(layout, op, elements):
    """Returns the bytes that go to one peer: the description, a frame of its own, and the frames of the layout."""
    text = str(layout)
    lines = text.count("\n")
    codec = f"layout of {lines} segments, hash {layout.hash}" if lines > 1 else text.split(" ")[2].strip()
    codec += ", levels of version 0" if "levels" in text else ""
    fields = [("op", op), ("tensors", 1), ("dtype", "float32"), ("elements a rank", elements)]
    fields += [("reduce op", "avg")] if op == "reduce_scatter" else []
    described = "".join(f"{key}={value}\n" for key, value in [*fields, ("codec", codec)])
    return 64 + len(described) + sum(64 + frame.payload_bytes for frame in plan(read_layout(text), CHUNK_BYTES))


@pytest.mark.on("pair", group={"pg_options": lc.Options(chunk_bytes=CHUNK_BYTES)}, alike=True)
def test_every_pair_of_quantizers(r):
    """One job: starting processes takes longer than all of it."""
    mesh = init_device_mesh("cpu", (r.size,))
    gradients = [torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(k)) for k in range(r.size)]
    here = slice(r.rank * ROWS // r.size, (r.rank + 1) * ROWS // r.size)
    crcs = []
    for weight_codec, gradient_codec in PAIRS:
        said = f"weights {weight_codec}, gradients {gradient_codec}"
        model = _Dot()
        whole = model.weight.detach().clone()
        fully_shard(model, mesh=mesh)
        comms = lc.fsdp.quantize(model, weights=weight_codec, gradients=gradient_codec)
        lc.reset_stats()
        model(gradients[r.rank]).backward()
        stats = lc.stats()[dist.group.WORLD.group_name]

        model.unshard()
        seen = model.weight.detach().clone()
        model.reshard()
        crcs.append((said, zlib.crc32(bits(seen).numpy().tobytes())))
        for x, y in zip(whole.chunk(r.size), seen.chunk(r.size), strict=True):
            errors = (y - x).abs().flatten()
            assert (errors <= _allowed(weight_codec, x.flatten())).all(), said
            assert (errors.max() > 0) == (weight_codec != "none"), said
        # A rank's own contribution is not coded, the others' are; the mean divides both.
        allowed = sum(_allowed(gradient_codec, g[here].flatten()) for k, g in enumerate(gradients) if k != r.rank)
        errors = (model.weight.grad.to_local() - torch.stack(gradients).mean(0)[here]).abs().flatten()
        assert (errors <= allowed / r.size + 1e-6).all(), said

        for op, comm, codec in (
            ("all_gather", comms._gathers[0], weight_codec),
            ("reduce_scatter", comms._reductions[0], gradient_codec),
        ):
            assert stats[op]["exact_calls"] == (stats[op]["calls"] if codec == "none" else 0), (said, stats[op])
            a_call = _message_bytes(comm.levels.layout, op, (ROWS + 1) * COLUMNS // r.size)
            assert stats[op]["wire_bytes"] == stats[op]["calls"] * a_call * (r.size - 1), (said, stats[op])
    return crcs
