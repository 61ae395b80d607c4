"""Compares layouts between ranks over all groups that a model's modules use, before any rank has changed anything."""

from collections.abc import Iterable, Mapping, Sequence

from torch_lowcomm import _C

Named = tuple[str, _C.Layout]


def agree(asked: Mapping[str, Sequence[Named]]) -> None:
    """Compares layouts with the other ranks of every group. Collective.

    The error of the first group that differs, or of which a rank raised, is raised on all its ranks.

    1. Every group compares its layouts. If one group differs, the others compare all the same: their ranks would wait.
    2. Groups that agreed learn in a second round of the others' differences. Groups share ranks, and so no rank goes on alone.

    Args:
        asked: Layouts by a group's name, in the same order on all ranks. Groups that are not lowcomm's are skipped.
    """
    first: Exception | None = None
    agreed = []
    for name, layouts in asked.items():
        backend = _C.find_backend(name)
        if backend is None:
            continue
        try:
            backend.agree_layouts(layouts)
            agreed.append(backend)
        except Exception as error:
            first = first or error
    for backend in agreed:  # on every rank of a group or on none: a difference raises on all of them
        try:
            backend.agree_layouts([], error=_said(first))
        except Exception as error:
            first = first or error
    if first is not None:
        raise first


def tell(names: Iterable[str], error: Exception) -> None:
    """Tells an error of this rank to its peers, which wait to agree and raise it too."""
    for name in names:
        backend = _C.find_backend(name)
        if backend is not None:
            backend.agree_layouts([], error=_said(error))


def _said(error: Exception | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"
