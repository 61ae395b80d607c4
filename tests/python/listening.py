"""A command that listens, for the time of a test."""

import subprocess
import sys
from contextlib import contextmanager


@contextmanager
def listening(*arguments):
    """The address that a command of `python -m torch_lowcomm` listens at, which it prints last in its first line."""
    command = [sys.executable, "-m", "torch_lowcomm", *arguments, "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        assert process.wait(timeout=20) == 0
