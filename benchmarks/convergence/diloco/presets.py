"""The runs of `convergence diloco` by name: DiLoCoX, what it is made of, what others do, what is left without a part."""

from __future__ import annotations

from typing import Any

from convergence.diloco.rank import Configuration

INT4 = "sym4:bucket=128"
TWO_BITS = "gauss2"
# DiLoCo (arXiv 2311.08105): every 20 steps, waiting.
DILOCO: dict[str, Any] = {"sync_every": 20, "mode": "sync", "outer_lr": 0.7, "outer_momentum": 0.9, "codec": None}
# A short interval, for where to go on while an average travels.
SHORT: dict[str, Any] = {"sync_every": 5, "outer_lr": 0.7, "outer_momentum": 0.6, "codec": None}
# DiLoCoX (arXiv 2506.21263), whole: H_1 = 20, and as there (2048 of 8192) r_1 a quarter of the width.
# sync_warmup: DiLoCoX's paper gives no number; a tenth of all is our choice.
FULL: dict[str, Any] = {
    "sync_every": 20,
    "mode": "continue",
    "outer_lr": 0.7,
    "outer_momentum": 0.6,
    "codec": INT4,
    "rank": 24,
    "error_feedback": True,
    "adapt_rank": True,
    "adapt_sync_every": True,
    "min_rank": 2,
    "min_sync_every": 5,
    "sync_warmup": 3,
}


def without(*options: str) -> dict[str, Any]:
    """The whole method except for some options, which are left at their defaults."""
    return {name: value for name, value in FULL.items() if name not in options}


ADAPTIVE = ("adapt_rank", "adapt_sync_every", "min_rank", "min_sync_every")
PRESETS: dict[str, Configuration] = {
    "all_reduce": Configuration(),
    "DiLoCo": Configuration(outer=DILOCO),
    "DiLoCo, int4": Configuration(outer=DILOCO | {"codec": INT4, "error_feedback": False}),
    "DiLoCo, int4 EF": Configuration(outer=DILOCO | {"codec": INT4, "error_feedback": True}),
    "DiLoCo, gauss2": Configuration(outer=DILOCO | {"codec": TWO_BITS}),
    "DiLoCo, rank 16": Configuration(outer=DILOCO | {"codec": "fp16", "rank": 16, "error_feedback": False}),
    "rank 16, int4 EF": Configuration(
        outer=DILOCO | {"codec": INT4, "rank": 16, "error_feedback": True, "outer_momentum": 0.6}
    ),
    "H=5 sync": Configuration(outer=SHORT | {"mode": "sync"}),
    "H=5 continue": Configuration(outer=SHORT | {"mode": "continue"}),
    "H=5 continue, int4 EF": Configuration(outer=SHORT | {"mode": "continue", "codec": INT4, "error_feedback": True}),
    "H=5 restart": Configuration(outer=SHORT | {"mode": "restart"}),
    "H=5 eager": Configuration(outer=SHORT | {"mode": "eager"}),
    # arXiv 2501.18512: fragments in turn, applied later, mixed in by halves.
    "Streaming DiLoCo": Configuration(
        outer=DILOCO
        | {"mode": "restart", "codec": INT4, "fragments": 4, "fragment_sync_delay": 5, "fragment_update_alpha": 0.5}
    ),
    # arXiv 2508.15706: no outer momentum, for the residual of what is not sent takes its place.
    "SparseLoCo": Configuration(
        outer=DILOCO
        | {"codec": "topk:keep=0.02,values=mid2", "error_feedback": True, "outer_lr": 1.0, "outer_momentum": 0.0}
    ),
    # arXiv 2505.23725.
    "Muon, gauss2": Configuration(outer=DILOCO | {"codec": TWO_BITS}, muon=True),
    "DiLoCoX": Configuration(outer=FULL),
    "no overlap": Configuration(outer=FULL | {"mode": "sync"}),
    "no compression": Configuration(outer=without("rank", "error_feedback", *ADAPTIVE) | {"codec": None}),
    "no low rank": Configuration(outer=without("rank", *ADAPTIVE)),
    "no error feedback": Configuration(outer=FULL | {"error_feedback": False}),
    "fixed r and H": Configuration(outer=without(*ADAPTIVE)),
    "DiLoCoX, gauss2": Configuration(outer=FULL | {"codec": TWO_BITS}),
    "DiLoCoX, D=3": Configuration(outer=FULL, ranks=3),
}


def open_diloco(outer_steps: int, steps: int) -> Configuration:
    """OpenDiLoCo (arXiv 2407.07852), which sends fp16, with that many outer steps, the last of them at the end."""
    every = steps // outer_steps
    return Configuration(outer=DILOCO | {"codec": "fp16", "error_feedback": False, "sync_every": every})


def cocktail(keep: float, stride: int = 10) -> Configuration:
    """CocktailSGD with a tenth at random, as the paper, and that share of it by top-k."""
    return Configuration(cocktail={"stride": stride, "keep": keep})
