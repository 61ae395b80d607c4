"""What machines must run alike: the first to say it is right."""

from __future__ import annotations


def expect_alike(what: str, first: str, text: str) -> None:
    """Compares this machine's description of something with the first machine's.

    Raises:
        ValueError: They differ; shows both from the first word that does.
    """
    if first == text:
        return
    at = next((i for i, (a, b) in enumerate(zip(first, text, strict=False)) if a != b), min(len(first), len(text)))
    begin = max(0, first.rfind(" ", 0, at))
    raise ValueError(
        f"{what}: expected what the other machines of this store have, {first[begin : at + 60].strip()!r}..., got "
        f"{text[begin : at + 60].strip()!r}...: a run with other options needs a store, or a prefix, of its own"
    )
