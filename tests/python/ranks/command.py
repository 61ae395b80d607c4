"""A program and what it starts, under a deadline."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from typing import NamedTuple

from ranks.job import RanksFailed
from ranks.starters import environment

# torchrun gives its workers 30 s to end after a SIGTERM.
PATIENCE_S = 40.0


class CommandResult(NamedTuple):
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str

    @property
    def text(self):
        return f"{self.out}\n{self.err}"


def torchrun(size, *options):
    """The words in front of a program that torchrun starts as so many ranks."""
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), *options]


def run_command(args, *, deadline_s, env=None, cwd=None, patience_s=PATIENCE_S):
    """Runs a command (torchrun and what it starts) in a session of its own; it must end by itself within the deadline.

    torchrun's workers have sessions of their own, which no signal to ours reaches: at the deadline the command is asked to
    end (SIGTERM), which lets it end them first, and only after `patience_s` its process group is killed.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [str(a) for a in args],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment(env),
            cwd=cwd,
            start_new_session=True,
        )
        code = None
        try:
            code = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        err.seek(0)
        ended = CommandResult(code, out.read(), err.read())
    if code is None:
        raise RanksFailed(f"no end within {deadline_s} s: {' '.join(map(str, args))}\n{ended.text}")
    return ended
