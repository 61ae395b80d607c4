"""A worker thread for ops that consist of several collectives. It runs them in the order of issue, each with a future."""

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.futures import Future


class OpQueue:
    """Runs ops one after the other on a separate thread, which ends with this object or the interpreter."""

    def __init__(self, name: str) -> None:
        self._worker = ThreadPoolExecutor(1, name)

    def issue(self, run: Callable[[], None], tensors: list[torch.Tensor]) -> Future[torch.Tensor]:
        """Queues an op and returns the future of its result, whose wait raises what `run` raised.

        `tensors` are those that it reads and writes, all on one device; the first is its result. On a CUDA device the op runs on
        a separate stream after the work of the caller's stream, and a wait for the future waits for both. The worker runs the
        future's callbacks, which must not wait for another op of this queue.
        """
        result, stream = tensors[0], None
        future: Future[torch.Tensor] = Future(devices=[result.device] if result.is_cuda else None)
        if result.is_cuda:
            stream = torch.Stream(result.device)
            stream.wait_stream(torch.accelerator.current_stream(result.device))
            for tensor in tensors:
                tensor.record_stream(stream)
        self._worker.submit(_run, run, result, future, stream)
        return future


def _run(
    run: Callable[[], None], result: torch.Tensor, future: Future[torch.Tensor], stream: torch.Stream | None
) -> None:
    """Runs an op on the worker; its future ends with the result or the error."""
    if stream is not None:
        torch.accelerator.set_device_index(stream.device.index)  # and not set back: setting a device gives it a context
    with stream or contextlib.nullcontext(), torch.no_grad():
        try:
            run()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)
