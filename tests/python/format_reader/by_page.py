"""A group of two: the library as rank 0, on a thread, and a rank that follows the page."""

import threading
from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed import HashStore

from format_reader.conversation import Peer
from torch_lowcomm import _C

TIMEOUT = timedelta(seconds=30)


def no_nccl(*_):
    """As on a machine without a GPU."""
    return None


def channel_of(
    group: object, number: int, codec: str = "", first: str = "", channels: int = 1, memory: object = None
) -> _C.BoundaryChannel:
    """The library's end of a channel to the page's rank."""
    given = {"codec": codec, "first": first, "channels": channels, "memory": memory}
    return _C.BoundaryChannel(group, 1, number, dtype=torch.float32, edge="", part="", **given)


def with_library(
    policy: str | None, part: Callable[[object, torch.Tensor], None], tensor: torch.Tensor, chunk_bytes: int = 65536
) -> tuple:
    """Starts `part(backend, tensor)` on a thread as rank 0; returns (thread, its errors, the page's rank 1)."""
    store, errors, done = HashStore(), [], threading.Event()

    def rank0() -> None:
        try:
            options = _C.Options(policy=policy, min_bytes=0, chunk_bytes=chunk_bytes, seed=11)
            backend = _C.create_backend(store, 0, 2, options, TIMEOUT, "by the page", [0, 1], no_nccl)
            part(backend, tensor)
            done.wait(30)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=rank0, daemon=True)
    thread.start()
    return thread, errors, Peer(store), done


def ended(thread: threading.Thread, done: threading.Event) -> None:
    """Lets rank 0 go."""
    done.set()
    thread.join(30)
    assert not thread.is_alive()
