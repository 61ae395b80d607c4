"""Compares what all machines must run equally; the description of the first machine counts."""

from __future__ import annotations


def expect_alike(what: str, first: str, text: str) -> None:
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
    at = next((i for i, (a, b) in enumerate(zip(first, text, strict=False)) if a != b), min(len(first), len(text)))
    begin = max(0, first.rfind(" ", 0, at))
    raise ValueError(
        f"{what}: expected what the other machines of this store have, {first[begin : at + 60].strip()!r}..., got "
        f"{text[begin : at + 60].strip()!r}...: a run with other options needs another store or prefix"
    )
