"""Error of every codec against its bits an element, on tensors that training sends.

benchmarks/results/codec_errors.md has the definitions.

python benchmarks codec_errors [--json FILE]

Trains the byte GPT of examples/ in one process, takes the tensors that the methods send, and codes each of them.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import data
import model
import torch
from report import Gate, finish, heading

import torch_lowcomm as lc

WARM_UP, OUTER = 100, 20  # steps before the tensors are taken; inner steps of a pseudo-gradient
BATCH = 8
KINDS = ("gradient", "weight", "pseudo-gradient", "activation", "activation delta")

# Buckets and metadata as their texts give them; the number of bits an element is measured, not named.
FAMILIES = {
    "minmax": [f"minmax{b}:bucket=1024" for b in range(1, 9)],
    "minmax, B 128, bf16": [f"minmax{b}:bucket=128,meta=bf16" for b in range(1, 9)],
    "qsgd": [f"qsgd{b}:bucket=1024" for b in range(1, 9)],
    "qsgd, B 512, bf16, rotated": [f"qsgd{b}:bucket=512,rotate=1,meta=bf16" for b in range(1, 9)],
    "lattice": [f"lattice{b}:bucket=1024" for b in range(1, 9)],
    "sym": [f"sym{b}:bucket=1024" for b in range(2, 9)],
    "sym, l2": [f"sym{b}:bucket=1024,range=l2" for b in range(2, 9)],
    "mid": [f"mid{b}:bucket=1024" for b in range(1, 9)],
    "gauss": [f"gauss{b}" for b in range(1, 9)],
    "sign1": ["sign1:bucket=1024"],
    "topk, sym8 values": [f"topk:keep={keep},values=sym8" for keep in (0.01, 0.05, 0.1, 0.2, 0.4)],
    "logbyte": ["logbyte"],
    "log9": ["log9"],
    "bf16": ["bf16"],
    "fp16": ["fp16"],
}


@dataclasses.dataclass
class Row:
    """One codec on all kinds of tensors."""

    family: str
    codec: str
    bits: float  # an element, metadata included
    error: dict[str, float]  # by kind: the L2 norm of decoded - x over that of x


def tensors() -> dict[str, list[torch.Tensor]]:
    """Returns the tensors that training sends, by kind, after WARM_UP steps: the model's matrices or the input of its blocks."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    corpus = data.load(None, context=model.Config().context)
    gpt = model.GPT()
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3)

    def loss(step: int) -> torch.Tensor:
        return gpt(*corpus.batch(BATCH, model.Config().context, seed=0, step=step, rank=0))

    def train(first: int, steps: int) -> None:
        for step in range(first, first + steps):
            optimizer.zero_grad()
            loss(step).backward()
            optimizer.step()

    def activations(step: int) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        hooks = [b.register_forward_pre_hook(lambda _, x: seen.append(x[0].detach().clone())) for b in gpt.blocks]
        with torch.no_grad():
            loss(step)
        for hook in hooks:
            hook.remove()
        return seen

    matrices = [p for p in gpt.parameters() if p.dim() > 1]
    train(0, WARM_UP)
    before = [p.detach().clone() for p in matrices]
    first = activations(0)
    train(WARM_UP, OUTER)
    delta = [a - b for a, b in zip(activations(0), first, strict=True)]  # of the same sample, as a message cache has it
    optimizer.zero_grad()
    loss(WARM_UP + OUTER).backward()
    return {
        "gradient": [p.grad.clone() for p in matrices],
        "weight": [p.detach().clone() for p in matrices],
        "pseudo-gradient": [b - p.detach() for b, p in zip(before, matrices, strict=True)],
        "activation": first,
        "activation delta": delta,
    }


def measure(kinds: dict[str, list[torch.Tensor]]) -> list[Row]:
    """All codecs on all tensors; the error of a kind is over all its tensors together."""
    rows = []
    for family, specs in FAMILIES.items():
        for spec in specs:
            codec = lc.codec(spec)
            error: dict[str, float] = {}
            bits = elements = 0
            for kind, members in kinds.items():
                lost = norm = 0.0
                for i, x in enumerate(members):
                    y = codec.roundtrip(x, seed=1, stream=i)
                    lost += (y.double() - x.double()).square().sum().item()
                    norm += x.double().square().sum().item()
                    bits += 8 * codec.encoded_bytes(x.numel())
                    elements += x.numel()
                error[kind] = (lost / norm) ** 0.5
            rows.append(Row(family, spec, bits / elements, error))
    return rows


def gates(rows: list[Row]) -> list[Gate]:
    """The claims that the choice of codecs rests on."""
    error = {row.codec: row.error for row in rows}
    gradient = {codec: of["gradient"] for codec, of in error.items()}
    return [
        Gate("gauss2 on gradients", gradient["gauss2"], "<=", 0.36),
        Gate(
            "gauss2 on gradients, of minmax2's error", gradient["gauss2"] / gradient["minmax2:bucket=1024"], "<=", 0.5
        ),
        Gate("gauss4 on gradients", gradient["gauss4"], "<=", 0.105),
        Gate(
            "qsgd4 rotated on gradients, of qsgd4's error",
            gradient["qsgd4:bucket=512,rotate=1,meta=bf16"] / gradient["qsgd4:bucket=1024"],
            "<=",
            0.9,
        ),
    ]


def main() -> int:
    """The exit status: 1 when a gate fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(heading("codec_errors", warm_up_steps=WARM_UP, outer_steps=OUTER))
    print(f"# {'codec':<38} {'bits':>6}" + "".join(f" {kind:>16}" for kind in KINDS))
    rows = measure(tensors())
    for row in rows:
        print(f"  {row.codec:<38} {row.bits:>6.2f}" + "".join(f" {row.error[kind]:>16.4f}" for kind in KINDS))
    content = {
        "configuration": {"warm_up_steps": WARM_UP, "outer_steps": OUTER, "batch": BATCH},
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    return finish(gates(rows), arguments.json, content)
