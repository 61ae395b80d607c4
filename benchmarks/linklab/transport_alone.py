"""lowcomm's TCP transport by itself, between two ranks: a program (transport_alone.cpp), compiled on first use."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from linklab.errors import LabUnavailable
from linklab.tools import die_with_us

_ROOT = Path(__file__).resolve().parents[2]
_BUILD = _ROOT / "build-linklab"
_COMPILE_S = 1800


def program() -> Path:
    """The compiled program, of the library's sources as they are. LabUnavailable where they do not compile."""
    configure = ["cmake", "-S", str(_ROOT), "-B", str(_BUILD), "-DLOWCOMM_EXTENSION=OFF"]
    build = ["cmake", "--build", str(_BUILD), "--target", "transport_alone", "--parallel", "2"]
    for command in (configure, build):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_S)
        if done.returncode != 0:
            raise LabUnavailable(
                f"expected `{' '.join(command)}` to succeed, it ended with {done.returncode}: {done.stderr}"
            )
    return _BUILD / "transport_alone"


class Exchange:
    """A rank's program, which waits for its turns."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __call__(self) -> tuple[float, float, float]:
        """An exchange: when it began and ended on the monotonic clock, and CPU seconds."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        begin, end, cpu = map(float, self._process.stdout.readline().split())
        return begin, end, cpu


@contextlib.contextmanager
def running(path: str, folder: str, rank: int, nbytes: int) -> Iterator[Exchange]:
    """The program at `path` of one of two ranks, until the block ends; both meet in `folder`, which is new."""
    with subprocess.Popen(
        [path, folder, str(rank), str(nbytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=sys.stderr,
        text=True,
        preexec_fn=die_with_us,
    ) as process:
        yield Exchange(process)
