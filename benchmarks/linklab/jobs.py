"""Programs on a lab's hosts: started together, ended together, by a deadline."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO

from linklab.errors import LabError
from linklab.tools import command_inside, die_with_us

_GRACE_S = 10  # what the other ranks get to end by themselves once one has failed
_TERM_S = 5  # between SIGTERM and SIGKILL


@dataclasses.dataclass(frozen=True)
class RankExit:
    """How a rank ended: its exit code (negative: a signal) and what it printed, both streams ("" where shown instead)."""

    code: int
    output: str


class Job:
    """Started processes, one a host. Made by Lab.start; end it by wait() or kill(), the lab's end does the latter."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._outputs: list[IO[bytes] | None] = []

    def _add(self, namespace: str, command: Sequence[str], env: Mapping[str, str], show: bool) -> None:
        output = None if show else tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the job
        process = subprocess.Popen(
            command_inside(namespace, list(command)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            env=dict(env),
            # A session of its own: the terminal's Ctrl-C is the lab's to answer, and killpg reaches what it starts.
            start_new_session=True,
            preexec_fn=die_with_us,
        )
        self._processes.append(process)
        self._outputs.append(output)

    @property
    def pids(self) -> list[int]:
        """A process number a rank."""
        return [process.pid for process in self._processes]

    def running(self) -> list[int]:
        """Ranks that have not ended."""
        return [rank for rank, process in enumerate(self._processes) if process.poll() is None]

    def output(self, rank: int) -> str:
        """Returns the text that a rank has printed so far."""
        file = self._outputs[rank]
        return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace") if file else ""

    def wait(self, timeout_s: float) -> list[RankExit]:
        """How each rank ended. Once one fails, the others are killed after 10 s. Where one outlives timeout_s all are killed,
        and the LabError has what each said last.
        """
        end = time.monotonic() + timeout_s
        failed_at: float | None = None
        while running := self.running():
            now = time.monotonic()
            if failed_at is None and any(process.returncode for process in self._processes):
                failed_at = now
            if failed_at is not None and now > failed_at + _GRACE_S:
                self.kill()
                break
            if now > end:
                self.kill()
                said = "".join(f"\n---- rank {rank}\n{self.output(rank)[-2000:]}" for rank in running)
                raise LabError(f"expected every rank to end within {timeout_s:g} s, ranks {running} did not{said}")
            time.sleep(0.02)
        return [RankExit(process.returncode, self.output(rank)) for rank, process in enumerate(self._processes)]

    def kill(self) -> None:
        """Ends what runs: SIGTERM to each rank's process group, SIGKILL five seconds later."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            alive = self.running()
            for rank in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pids[rank], number)
            end = time.monotonic() + _TERM_S
            while self.running() and time.monotonic() < end:
                time.sleep(0.01)
