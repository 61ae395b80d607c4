"""The runs of `convergence diloco` by name: DiLoCoX, what it is made of, what others do, what is left without a part."""

from __future__ import annotations

from typing import Any

from convergence.diloco.rank import Configuration
from torch_lowcomm.diloco import presets
from torch_lowcomm.diloco.presets import INT4, TWO_BITS

# DiLoCo: every 20 steps.
DILOCO: dict[str, Any] = presets.diloco(sync_every=20)
# A short interval, for where to go on while an average travels.
SHORT: dict[str, Any] = {"sync_every": 5, "outer_lr": 0.7, "outer_momentum": 0.6, "codec": None}
# DiLoCoX, whole: H_1 = 20, and as in the paper (2048 of 8192) r_1 a quarter of the width.
FULL: dict[str, Any] = presets.diloco_x(sync_every=20, rank=24)


def without(*options: str) -> dict[str, Any]:
    """The whole method except for some options, which are left at their defaults."""
    return {name: value for name, value in FULL.items() if name not in options}


ADAPTIVE = ("adapt_rank", "adapt_sync_every", "min_rank")
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
    "Streaming DiLoCo": Configuration(outer=presets.streaming(sync_every=20)),
    "SparseLoCo": Configuration(outer=presets.sparse_loco(sync_every=20)),
    "Muon, gauss2": Configuration(outer=presets.mu_loco(sync_every=20), muon=True),
    "DiLoCoX": Configuration(outer=FULL),
    "no overlap": Configuration(outer=FULL | {"mode": "sync"}),
    "no compression": Configuration(outer=without("rank", "error_feedback", *ADAPTIVE) | {"codec": None}),
    "no low rank": Configuration(outer=without("rank", *ADAPTIVE)),
    "no error feedback": Configuration(outer=FULL | {"error_feedback": False}),
    "fixed r and H": Configuration(outer=without(*ADAPTIVE)),
    "DiLoCoX, gauss2": Configuration(outer=FULL | {"codec": TWO_BITS}),
    "DiLoCoX, D=3": Configuration(outer=FULL, ranks=3),
}
# Fewer bytes than DiLoCo in float32: options, how many times fewer at least, and a bound of the loss over DiLoCo's.
SELDOM: dict[str, Any] = {"mode": "sync", "outer_lr": 1.0, "outer_momentum": 0.3, "codec": TWO_BITS}
ONCE: dict[str, Any] = SELDOM | {"sync_every": 600, "outer_momentum": 0.0, "codec": "gauss3"}
SPARSE: dict[str, Any] = presets.sparse_loco(sync_every=200) | {"codec": "topk:chunk=4096,keep=1024,values=sign1"}
BITS: dict[str, tuple[dict[str, Any], float, float | None]] = {
    "DiLoCo": (DILOCO, 1, None),
    "gauss2, μ=0.6": (DILOCO | {"codec": TWO_BITS, "outer_momentum": 0.6}, 15, 1.01),
    "gauss2 EF, H=100": (SELDOM | {"sync_every": 100, "error_feedback": True}, 60, 1.01),
    "gauss3, once": (ONCE, 300, None),
    "SparseLoCo": (presets.sparse_loco(sync_every=20), 120, None),
    "SparseLoCo, H=200": (SPARSE, 200, None),
}
# The curves of the picture.
DRAWN = ("all_reduce", "DiLoCo", "DiLoCo, gauss2", "H=5 continue", "SparseLoCo", "DiLoCoX", "OpenDiLoCo", "CocktailSGD")


def open_diloco(outer_steps: int, steps: int) -> Configuration:
    """OpenDiLoCo with that many outer steps, the last of them at the end."""
    fp16 = {"codec": "fp16", "error_feedback": False}
    return Configuration(outer=presets.diloco(sync_every=steps // outer_steps) | fp16)


def cocktail(keep: float, stride: int = 10) -> Configuration:
    """CocktailSGD with a tenth at random, as the paper, and that share of it by top-k."""
    return Configuration(cocktail={"stride": stride, "keep": keep})
