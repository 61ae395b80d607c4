"""Two sides of a boundary compare how they were made, and what they remember, before anything else crosses it."""

from collections.abc import Mapping

import torch

from torch_lowcomm import _C

_FIRST_CHANNEL = 1 << 20  # of the channels of comparisons, one a boundary


def channel_of_numbers(
    backend: _C.LowcommBackend, peer: int, number: int, *, edge: str, part: str = ""
) -> _C.BoundaryChannel:
    """A channel to a peer whose messages are exact int64, and are not remembered; `edge` and `part` name it."""
    return _C.BoundaryChannel(
        backend, peer, number, dtype=torch.int64, codec="", first="", channels=1, memory=None, edge=edge, part=part
    )


def compare(
    backend: _C.LowcommBackend, peer: int, number: int, where: str, said: Mapping[str, str], rows: torch.Tensor
) -> torch.Tensor:
    """Tells the other side what is said here, and the rows of a cache; both sides call it.

    Args:
        backend: The group.
        peer: The group's rank on the other side.
        number: Of the boundary.
        where: The boundary's name.
        said: What both sides must have equal, by name. A name that one side alone has is not compared.
        rows: int64 [rows, 4], what is remembered here.

    Returns:
        The other side's rows. Where the two say different things, both raise ValueError with both values.
    """
    channel = channel_of_numbers(backend, peer, _FIRST_CHANNEL + number, edge=f"caches of {where}")
    text = torch.tensor(list("\n".join(f"{name}={value}" for name, value in said.items()).encode()), dtype=torch.int64)
    letters, theirs = _exchange(channel, torch.tensor([len(text), len(rows)]), (2,)).tolist()
    other = bytes(_exchange(channel, text, (letters,)).tolist()).decode()
    for line in other.splitlines():
        name, _, value = line.partition("=")
        if said.get(name, value) != value:
            raise ValueError(
                f"{where}: {name}: expected the same on both sides, rank {backend.rank()} has {said[name]!r}, rank {peer} has "
                f"{value!r}"
            )
    return _exchange(channel, rows, (theirs, 4))


def _exchange(channel: _C.BoundaryChannel, mine: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The other side's tensor, of `shape`."""
    theirs = torch.empty(shape, dtype=mine.dtype)
    receive = channel.recv(theirs, [])
    send = channel.send(mine.contiguous(), [])
    receive.wait()
    send.wait()
    return theirs
