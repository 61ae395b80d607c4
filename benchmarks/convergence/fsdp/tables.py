"""QSDP's own tables and figures (arXiv 2302.02390), part by part, next to what the paper has.

`sizes`: 8 bits by size of the model (Table 1). `levels`: learned against even levels (Table 3). `bits`: pairs of bits for
weights and gradients (Tables 1 and 2), and 8 bits without buckets. `errors`: what levels lose while a model trains (Figures 7
and 8). As root, `fake`: what a step would take were only a share of the bytes sent (Figure 6 and Appendix B), and `grid`: what
it takes by bits of weights and of gradients (Table 5). A part is a function of a file of this folder.
"""

from __future__ import annotations

from typing import Any

from report import Gate

from convergence.fsdp import bits as fsdp_bits
from convergence.fsdp import errors as fsdp_errors
from convergence.fsdp import fake as fsdp_fake
from convergence.fsdp import levels as fsdp_levels
from convergence.fsdp import sizes as fsdp_sizes

PARTS = {
    "sizes": fsdp_sizes.measure,
    "levels": fsdp_levels.measure,
    "bits": fsdp_bits.measure,
    "errors": fsdp_errors.measure,
    "fake": fsdp_fake.measure,
    "grid": fsdp_fake.measure_grid,
}
ON_LINKS = ("fake", "grid")


def measure(*, quick: bool, seeds: int, only: str = "") -> tuple[dict[str, Any], list[Gate]]:
    """Runs all parts, or `only` one of PARTS; prints a row a run and a table a part.

    Args:
        quick: A few runs of a few steps, without `fake` and `grid`, and bounds that are loose.
        seeds: Of `sizes`, `levels` and `bits`; `errors` has one.
        only: A part.

    Returns:
        `tables`, and the parts' `configurations`, `curves`, `errors` and `links` for the JSON; and the gates.
    """
    content: dict[str, Any] = {"tables": [], "configurations": {}, "curves": []}
    gates: list[Gate] = []
    for part, measure_part in PARTS.items():
        if only not in ("", part) or (quick and part in ON_LINKS and not only):
            continue
        found, passed = measure_part(quick=quick, seeds=seeds)
        for key, value in found.items():
            content[key] = content[key] | value if key == "configurations" else content.get(key, []) + value
        gates += passed
    return content, gates
