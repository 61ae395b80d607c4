"""Figures for a training's logs: TensorBoard's, W&B's and others'."""

from collections.abc import Callable
from typing import Any

from torch_lowcomm.live.account import notes
from torch_lowcomm.summary import summary


def log_to(writer: Any) -> Callable[[int], None]:
    """Returns a function that logs what this process has sent since its last call: `log = lc.log_to(writer)`, `log(step)`.

    Scalars are "lowcomm/sent_mb", "lowcomm/exact_mb" (without codecs), "lowcomm/wait_s" and "lowcomm/coding_s" since the last
    call, "lowcomm/error/<op>" (`relative_error` of `lc.stats`, since the process began), and what methods note of their
    progress, such as "lowcomm/DiLoCoX/outer_steps". A call asks no other rank.

    Args:
        writer: An object with `add_scalar(tag, value, step)`, such as TensorBoard's SummaryWriter, or with
            `log(dict, step=step)`, such as a run of W&B.

    Raises:
        TypeError: The writer has neither method.
    """
    if not any(callable(getattr(writer, name, None)) for name in ("add_scalar", "log")):
        raise TypeError(f"log_to: writer: expected one with add_scalar or log, got {type(writer).__name__}")
    before: dict[str, float] = {}

    def log(step: int) -> None:
        nonlocal before
        of = summary()
        megabytes = {"sent_mb": of.wire_bytes / 1e6, "exact_mb": of.raw_bytes / 1e6}
        now = megabytes | {"wait_s": of.wait_s, "coding_s": of.coding_s}
        scalars = {name: value - before.get(name, 0.0) for name, value in now.items()}
        before = now
        scalars |= {f"error/{op}": figures["relative_error"] for op, figures in of.ops.items()}
        scalars |= {f"{what}/{name}": value for what, told in notes.items() for name, value in told.items()}
        numbers = {f"lowcomm/{name}": value for name, value in scalars.items() if isinstance(value, (int, float))}
        if hasattr(writer, "add_scalar"):
            for name, value in numbers.items():
                writer.add_scalar(name, value, step)
        else:
            writer.log(numbers, step=step)

    return log
