"""A future that ends after several others, in the order of their devices' streams."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.futures import Future, collect_all


def after(futures: Sequence[Future[Any]], run: Callable[[], None], result: torch.Tensor) -> Future[torch.Tensor]:
    """Returns the future of a tensor that is ready once `run` has run, after all of several futures have ended.

    torch's own future of several (`collect_all`) has no device: it does not wait for their streams, and a wait for it does
    not cover kernels that were enqueued after them.

    Args:
        futures: `run` is called after all of them; its kernels wait for the streams of each. One that fails fails the result.
        run: Called once, by the thread that ends the last future. The result raises what it raises.
        result: The tensor. On a CUDA device a wait for the future makes the current stream wait for the kernels of `run`.
    """
    ended: list[Future[Any]] = []
    begin: Future[None] = Future(devices=[result.device] if result.device.type == "cuda" else None)

    def all_ended(of_all: Future[Any]) -> None:
        ended.append(of_all)
        begin.set_result(None)

    def finish(_: Future[None]) -> torch.Tensor:
        ended[0].value()  # raises what one has failed with
        for future in futures:
            future.wait()  # makes the current stream wait too
        run()
        return result

    finished = begin.then(finish)  # an error in a callback of then() reaches C++; an error set on a Future does not
    collect_all(list(futures)).add_done_callback(all_ended)
    return finished
