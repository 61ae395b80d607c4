"""Compares what all machines must run equally; the description of the first machine counts."""

from __future__ import annotations

from torch_lowcomm._text_difference import differing_parts


def expect_equal(what: str, first: str, text: str) -> None:
    """Compares this machine's description with the first machine's.

    Args:
        what: Name of what is compared, for the error.
        first: The first machine's description.
        text: This machine's description.

    Raises:
        ValueError: They differ; the message has both from the first word that differs.
    """
    if first == text:
        return
    theirs, mine = differing_parts(first, text)
    raise ValueError(
        f"{what}: expected what the other machines of this store have, {theirs!r}..., got {mine!r}...: a run with other "
        "options needs another store or prefix"
    )
