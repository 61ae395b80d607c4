"""What the package logs in a rank's process, where pytest's caplog does not reach."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def kept_log(level: int = logging.INFO) -> Iterator[list[str]]:
    """Gives the messages that the package logs inside this context, of a level and above."""
    lines: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torch_lowcomm")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield lines
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
