"""The runs of `convergence subspace` by name. Width 256, so that k = 32 is d / 8."""

from __future__ import annotations

import dataclasses

from convergence.subspace.rank import Configuration

TOKEN = "bucket=256"  # a scale a token, where a codec rounds all its numbers
# The runs of the gates.
CLAIMS = {
    "free": Configuration("whole"),
    "constrained, 32": Configuration("constrained", rank=32),
    "constrained, 32, normal rows": Configuration("constrained", rank=32, fixed="gaussian"),
    "constrained, 32 in 8 bits": Configuration("constrained", rank=32, coefficients="minmax8:bucket=128"),
    "constrained, 64 in 4 bits": Configuration("constrained", rank=64, coefficients="minmax4:bucket=128"),
    "top-k, 25 of 256": Configuration("top-k", rank=25),
    "1 bit of all": Configuration("one-bit"),
}
# Other boundaries of as many bytes.
VARIANTS = {
    "4 bits of all": Configuration("whole", coefficients=f"minmax4:{TOKEN}"),
    "2 bits of all": Configuration("whole", coefficients=f"minmax2:{TOKEN}"),
    "gauss4 of all": Configuration("whole", coefficients="gauss4"),
    "constrained, 32 in bf16": Configuration("constrained", rank=32, coefficients="bf16"),
    "constrained, 32 in 4 bits": Configuration("constrained", rank=32, coefficients="minmax4:bucket=128"),
    "constrained, 32, no fixed rows": Configuration("constrained", rank=32, sigma=0.0),
}
# What the last block's constraint costs, which no boundary needs.
_SMALL = {"width": 128, "layers": 4, "stages": 4, "steps": 300}
FREE_BLOCKS = {
    "free, width 128": Configuration("whole", **_SMALL),
    "constrained, 16": Configuration("constrained", rank=16, **_SMALL),
    "constrained, 16, all blocks": Configuration("constrained", rank=16, free_blocks=0, **_SMALL),
}
# Losses after equal seconds on a slow link (ratios.py; the paper's figure 2 and table 1): k from d / 8 to d / 128, in
# fp32, and in 8 and 4 bits down to 8 coefficients, next to the free decoder with exact and coded messages.
_EACH = {"layers": 4, "stages": 4, "steps": 600, "watched": 64}
BY_SECONDS = {
    "free, 4 stages": Configuration("whole", **_EACH),
    "8 bits of all, 4 stages": Configuration("whole", coefficients=f"minmax8:{TOKEN}", **_EACH),
    "4 bits of all, 4 stages": Configuration("whole", coefficients=f"minmax4:{TOKEN}", **_EACH),
    **{
        f"d / {256 // rank}{suffix}": Configuration("constrained", rank=rank, coefficients=coefficients, **_EACH)
        for rank, ways in ((32, 3), (16, 3), (8, 3), (4, 1), (2, 1))
        for suffix, coefficients in (
            ("", "fp32"),
            (" in 8 bits", "minmax8:bucket=128"),
            (" in 4 bits", "minmax4:bucket=128"),
        )[:ways]
    },
}
# The curves of the picture.
DRAWN = (
    *("free", "constrained, 32", "constrained, 32 in 8 bits", "4 bits of all", "top-k, 25 of 256"),
    *("2 bits of all", "1 bit of all"),
)
QUICK = (
    *("free", "constrained, 32", "constrained, 32 in 8 bits", "1 bit of all"),
    *("free, 4 stages", "d / 8", "d / 8 in 4 bits"),
)


def shortened(configuration: Configuration) -> Configuration:
    """For --quick: a smaller decoder in two stages, and fewer steps."""
    return dataclasses.replace(
        configuration, width=64, layers=2, stages=2, rank=max(1, configuration.rank // 4), steps=40, validation=32
    )
