"""A worker thread for ops that consist of several collectives. It runs them in the order of issue, each with a future."""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.futures import Future

_this_thread = threading.local()  # `works` where it is a worker


class OpQueue:
    """Runs ops one after the other on a separate thread, which ends with this object or the interpreter."""

    def __init__(self, name: str) -> None:
        self._worker = ThreadPoolExecutor(1, name)

    def issue(
        self, run: Callable[[], None], tensors: list[torch.Tensor], async_op: bool
    ) -> Future[torch.Tensor] | None:
        """Queues an op. Returns the future of its result with `async_op`; else waits for it. Either raises what `run` raised.

        `tensors` are those that it reads and writes, all on one device; the first is its result. On a CUDA device the op runs on
        a separate stream after the work of the caller's stream, and a wait for the future waits for both. A wait of a worker
        thread, which runs a future's callback, is a ValueError.
        """
        if not async_op and getattr(_this_thread, "works", False):
            raise ValueError("expected async_op=True in a callback of a future, which the worker runs; got False")
        result, stream = tensors[0], None
        future: Future[torch.Tensor] = Future(devices=[result.device] if result.is_cuda else None)
        if result.is_cuda:
            stream = torch.Stream(result.device)
            stream.wait_stream(torch.accelerator.current_stream(result.device))
            for tensor in tensors:
                tensor.record_stream(stream)
        self._worker.submit(_run, run, result, future, stream)
        if async_op:
            return future
        future.wait()
        return None


def _run(
    run: Callable[[], None], result: torch.Tensor, future: Future[torch.Tensor], stream: torch.Stream | None
) -> None:
    """Runs an op on the worker; its future ends with the result or the error."""
    _this_thread.works = True
    if stream is not None:
        torch.accelerator.set_device_index(stream.device.index)  # and not set back: setting a device gives it a context
    with stream or contextlib.nullcontext(), torch.no_grad():
        try:
            run()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)
