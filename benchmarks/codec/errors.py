"""Error of every codec against its bits an element, on tensors that training sends.

    python benchmarks codec_errors [--json FILE]

Trains the byte GPT of examples/ in one process, takes the tensors that the methods send, and codes each of them.
benchmarks/results/codec_errors.md has the definitions.
"""

from __future__ import annotations

from typing import Any

import data
import model
import report
import torch
from report import Gate
from tables import Columns

import torch_lowcomm as lc

WARM_UP, OUTER, BATCH = 100, 20, 8  # steps before the tensors are taken; inner steps of a pseudo-gradient
KINDS = ("gradient", "weight", "pseudo-gradient", "activation", "activation delta")
# The number of bits an element is measured, not named.
SPECS = [
    *(f"minmax{b}:bucket=1024" for b in range(1, 9)),
    *(f"minmax{b}:bucket=128,meta=bf16" for b in range(1, 9)),
    *(f"qsgd{b}:bucket=1024" for b in range(1, 9)),
    *(f"qsgd{b}:bucket=512,rotate=1,meta=bf16" for b in range(1, 9)),
    *(f"lattice{b}:bucket=1024" for b in range(1, 9)),
    *(f"sym{b}:bucket=1024" for b in range(2, 9)),
    *(f"sym{b}:bucket=1024,range=l2" for b in range(2, 9)),
    *(f"mid{b}:bucket=1024" for b in range(1, 9)),
    *(f"gauss{b}" for b in range(1, 9)),
    "sign1:bucket=1024",
    *(f"topk:keep={keep},values=sym8" for keep in (0.01, 0.05, 0.1, 0.2, 0.4)),
    *("logbyte", "log9", "bf16", "fp16"),
]


def tensors() -> dict[str, list[torch.Tensor]]:
    """Returns the tensors that training sends, by kind, after WARM_UP steps: the model's matrices or the input of its blocks."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    corpus, context = data.load(), model.Config().context
    gpt = model.GPT()
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3)

    def loss(step: int) -> torch.Tensor:
        return gpt(*corpus.batch(BATCH, context, seed=0, step=step, rank=0))

    def train(first: int, steps: int) -> None:
        for step in range(first, first + steps):
            optimizer.zero_grad()
            loss(step).backward()
            optimizer.step()

    def activations() -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        hooks = [b.register_forward_pre_hook(lambda _, x: seen.append(x[0].detach().clone())) for b in gpt.blocks]
        with torch.no_grad():
            loss(0)
        for hook in hooks:
            hook.remove()
        return seen

    matrices = [p for p in gpt.parameters() if p.dim() > 1]
    train(0, WARM_UP)
    before, first = [p.detach().clone() for p in matrices], activations()
    train(WARM_UP, OUTER)
    delta = [a - b for a, b in zip(activations(), first, strict=True)]  # of the same sample, as a message cache has it
    optimizer.zero_grad()
    loss(WARM_UP + OUTER).backward()
    after = [p.detach().clone() for p in matrices]
    moved = [b - a for a, b in zip(after, before, strict=True)]
    gradients = [p.grad.clone() for p in matrices]
    return dict(zip(KINDS, (gradients, after, moved, first, delta), strict=True))


def measure(spec: str, kinds: dict[str, list[torch.Tensor]]) -> dict[str, Any]:
    """A codec on all tensors: `bits` an element, and by kind the L2 norm of decoded - x over that of x, of all its tensors."""
    codec, error = lc.codec(spec), {}
    sizes = [x.numel() for members in kinds.values() for x in members]
    for kind, members in kinds.items():
        pairs = [(codec.roundtrip(x, seed=1, stream=i).double(), x.double()) for i, x in enumerate(members)]
        lost = sum(float((y - x).square().sum()) for y, x in pairs)
        error[kind] = (lost / sum(float(x.square().sum()) for _, x in pairs)) ** 0.5
    return {"codec": spec, "bits": 8 * sum(map(codec.encoded_bytes, sizes)) / sum(sizes), "error": error}


def main() -> int:
    """The exit status: 1 when a gate fails."""
    args = report.arguments(__doc__).parse_args()
    print(report.heading("codec_errors", warm_up_steps=WARM_UP, outer_steps=OUTER))
    columns = Columns(f"codec 38 | bits 7.2f | {' | '.join(f'{kind} 17.4f' for kind in KINDS)}")
    print(columns.heading())
    rows, kinds = [], tensors()
    for spec in SPECS:
        rows.append(row := measure(spec, kinds))
        print(columns.row(spec, row["bits"], *row["error"].values()), flush=True)
    gradient = {row["codec"]: row["error"]["gradient"] for row in rows}
    of_minmax2 = gradient["gauss2"] / gradient["minmax2:bucket=1024"]
    of_qsgd4 = gradient["qsgd4:bucket=512,rotate=1,meta=bf16"] / gradient["qsgd4:bucket=1024"]
    gates = [
        Gate("gauss2 on gradients", gradient["gauss2"], "<=", 0.36),
        Gate("gauss2 on gradients, of minmax2's error", of_minmax2, "<=", 0.5),
        Gate("gauss4 on gradients", gradient["gauss4"], "<=", 0.105),
        Gate("qsgd4 rotated on gradients, of qsgd4's error", of_qsgd4, "<=", 0.9),
    ]
    return report.finish(gates, args.json, {"rows": rows})
