"""Small PNGs: a plot of lines and text needs few colours, and each version of one stays in the repository for good."""

from __future__ import annotations

from pathlib import Path

_COLOURS = 128


def shrink(path: Path) -> None:
    """Writes a PNG anew with at most _COLOURS colours, none far from its own, which takes a third of the bytes or less."""
    from PIL import Image  # matplotlib brings it

    with Image.open(path) as picture:
        few = picture.convert("RGB").quantize(_COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, "PNG", optimize=True)
