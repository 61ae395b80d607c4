"""Ranks that start together and end together: deadlines, exit codes, outputs."""

import os
import pathlib
import pickle
import signal
import sys
import tempfile
import time

from ranks.child import Rank, Request
from ranks.starters import Spawner, zygote

GRACE_S = 5.0  # what the other ranks get once one has failed


class RanksFailed(AssertionError):
    """A rank raised, ended with a code nobody allowed, or outlived the deadline; the message holds every rank's say."""


def source_of(fn):
    """The folder that a function's module is imported from."""
    return str(pathlib.Path(sys.modules[fn.__module__].__file__).parents[fn.__module__.count(".")])


class Job:
    """Started ranks, with what each printed, answered and how it ended."""

    def __init__(self, starter, fn, size, args, env):
        self.starter = starter
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="ranks-"))
        self.requests = [
            Request(
                rank=Rank(r, size, str(self.folder)),
                body=pickle.dumps((fn, args)),
                source=source_of(fn),
                env={"LOWCOMM_FLIGHT_DIR": str(self.folder), **(env or {})},
                output=str(self.folder / f"output{r}"),
                result=str(self.folder / f"result{r}"),
            )
            for r in range(size)
        ]
        self.pids = [starter.start(request) for request in self.requests]
        self.killed = set()

    def code(self, r, timeout_s=0.0):
        return self.starter.poll(self.pids[r], timeout_s)

    def alive(self):
        return [r for r in range(len(self.pids)) if self.code(r) is None]

    def kill(self, ranks, stacks=None):
        """The end, by process number; first each rank's stacks (or those of some ranks) into its output."""
        asked = ranks if stacks is None else set(ranks) & set(stacks)
        for r in asked:
            self._signal(r, signal.SIGUSR1)
        time.sleep(0.3 if asked else 0)
        for r in ranks:
            if self.code(r) is None and self._signal(r, signal.SIGKILL):
                self.killed.add(r)
        for r in ranks:
            while self.code(r, 0.05) is None:
                pass

    def _signal(self, r, number):
        """False for a rank that has ended, which the zygote may know before it has told."""
        try:
            os.kill(self.pids[r], number)
        except ProcessLookupError:
            return False
        return True

    def output(self, r):
        path = pathlib.Path(self.requests[r].output)
        return path.read_text(errors="replace") if path.exists() else ""

    def answer(self, r):
        path = pathlib.Path(self.requests[r].result)
        return pickle.loads(path.read_bytes()) if path.exists() else None

    def report(self, why):
        parts = [why]
        for r in range(len(self.pids)):
            answer = self.answer(r)
            code = self.code(r)
            ended = "killed" if r in self.killed else f"exit code {code}"
            parts.append(f"---- rank {r}: {ended}\n{answer[1] if answer and not answer[0] else ''}{self.output(r)}")
        return RanksFailed("\n".join(parts))

    def remove(self):
        for path in sorted(self.folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        self.folder.rmdir()


def run_ranks(
    fn,
    world_size,
    *args,
    timeout=60.0,
    env=None,
    allow_exit=None,
    kill_last=(),
    start="fork",
    outputs=None,
    exit_codes=None,
):
    """Runs `fn(Rank, *args)` on fresh processes; returns what each rank returned.

    Args:
        timeout: seconds until what is left is killed and the call fails with every rank's output and stacks.
        env: environment of the ranks, over the caller's; None unsets.
        allow_exit: rank -> an exit code or several (negative: a signal) that are no failure; such a rank may answer
            nothing (None in its place). Every other rank must end with 0, by itself.
        kill_last: ranks to kill once all the others have ended (a rank that a test stopped).
        start: "fork" from the zygote, or "spawn" a fresh interpreter.
        outputs: a list that gets each rank's stdout and stderr.
        exit_codes: a list that gets each rank's exit code.
    """
    allowed = {r: {c} if isinstance(c, int) else set(c) for r, c in (allow_exit or {}).items()}
    for r in kill_last:
        allowed.setdefault(r, set()).add(-signal.SIGKILL)
    job = Job(zygote() if start == "fork" else Spawner(), fn, world_size, args, env)
    ranks = range(world_size)
    end = time.monotonic() + timeout
    why = None
    try:
        while alive := job.alive():
            wrong = [r for r in ranks if job.code(r) is not None and job.code(r) not in allowed.get(r, set()) | {0}]
            if wrong and why is None:
                why = f"rank {wrong[0]} failed"
                end = min(end, time.monotonic() + GRACE_S)
            if set(alive) <= set(kill_last):
                job.kill(alive)
                break
            if time.monotonic() > end:
                why = why or f"no end within {timeout} s"
                job.kill(alive)
                break
            job.code(alive[0], 0.02)
        for r in ranks:
            code = job.code(r)
            if code not in allowed.get(r, set()) | {0}:
                why = why or f"rank {r} ended with code {code}"
            elif code == 0 and job.answer(r) is None and r not in allowed:
                why = why or f"rank {r} ended without an answer"
        if why:
            raise job.report(why)
        if exit_codes is not None:
            exit_codes.extend(job.code(r) for r in ranks)
        if outputs is not None:
            outputs.extend(job.output(r) for r in ranks)
        return [answer[1] if (answer := job.answer(r)) else None for r in ranks]
    finally:
        job.kill(job.alive())
        job.remove()
