"""A future that comes after several others, in the order of their devices' streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.futures import Future, collect_all


def after(futures: Sequence[Future[Any]], run: Callable[[], None], result: torch.Tensor) -> Future[torch.Tensor]:
    """The future of a tensor that is ready once `run` has run, which comes after all of several futures.

    torch's own future of several (`collect_all`) has no device: it waits for none of their streams, and who waits for it
    waits for nothing that was enqueued after them.

    Args:
        futures: What `run` comes after: its kernels, too, wait for what each of them stands for.
        run: Called once, by the thread that ends the last one. What it raises, the future raises.
        result: The tensor; on a CUDA device who waits for the future has the current stream wait for `run`'s kernels.

    Returns:
        The future. It fails as soon as one of `futures` does.
    """
    ended: list[Future[Any]] = []
    begin: Future[None] = Future(devices=[result.device] if result.device.type == "cuda" else None)

    def all_ended(of_all: Future[Any]) -> None:
        ended.append(of_all)
        begin.set_result(None)

    def finish(_: Future[None]) -> torch.Tensor:
        ended[0].value()  # raises what one has failed with
        for future in futures:
            future.wait()  # the current stream waits, too
        run()
        return result

    finished = begin.then(finish)  # an error in a callback of then() reaches C++, one that is set on a Future does not
    collect_all(list(futures)).add_done_callback(all_ended)
    return finished
