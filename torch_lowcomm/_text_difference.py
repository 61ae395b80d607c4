"""Shows where two long texts differ, such as the descriptions that machines or ranks compare."""

_SHOWN = 60  # characters from the first that differs


def differing_parts(a: str, b: str) -> tuple[str, str]:
    """Returns a piece of each text, from the word with the first difference."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    begin = max(0, a.rfind(" ", 0, at))
    return a[begin : at + _SHOWN].strip(), b[begin : at + _SHOWN].strip()


def show_both(a: object, b: object) -> str:
    """Shows two values in one text; of long texts the pieces that differ."""
    first, second = map(repr, differing_parts(a, b)) if isinstance(a, str) and isinstance(b, str) else (a, b)
    return f"{first} and {second}"


def expect_equal(what: str, first: str, text: str) -> None:
    """Raises ValueError where this machine's description is not that of the first machine at a store, which counts; the error
    has `what` is compared, and both texts from the first word that differs.
    """
    if first == text:
        return
    theirs, mine = differing_parts(first, text)
    raise ValueError(
        f"{what}: expected what the other machines of this store have, {theirs!r}..., got {mine!r}...: a run with other "
        "options needs another store or prefix"
    )
