"""A program and what it starts, under a deadline."""

import contextlib
import os
import signal
import subprocess
import tempfile

from ranks.job import RanksFailed
from ranks.starters import environment


def run_command(args, *, timeout, env=None, cwd=None):
    """Runs a command (torchrun and what it starts) in a session of its own; at the deadline that session is killed.

    Returns (exit code, stdout and stderr together).
    """
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(
            [str(a) for a in args],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment(env),
            cwd=cwd,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        text = out.read()
    if code is None:
        raise RanksFailed(f"no end within {timeout} s: {' '.join(map(str, args))}\n{text}")
    return code, text
