"""Namespaces' names, which say who owns them, and the removal of those whose owner is gone."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

from linklab.errors import LabError
from linklab.tools import ip

_NAME = re.compile(r"linklab-(\d+)-(\d+)-\d+-(?:wire|(?:host|router)\d)")
_END_S = 10


def started(pid: int) -> int | None:
    """When a process was started, in the kernel's ticks since boot; None where there is none of this number."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name, in brackets, may hold anything.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def prefix(number: int) -> str:
    """Returns the beginning of the names of this process's lab of a number.

    The process's start tells it from a later process of the same pid.
    """
    return f"linklab-{os.getpid()}-{started(os.getpid())}-{number}"


def existing(prefix: str = "linklab-") -> list[str]:
    """All labs' namespaces whose names begin so."""
    names = (line.split()[0] for line in ip("netns", "list").splitlines() if line.strip())
    return [name for name in names if _NAME.fullmatch(name) and name.startswith(prefix)]


def remove(name: str) -> None:
    """Ends every process in a namespace and removes it, and its devices with it. LabError when one will not end."""
    end = time.monotonic() + _END_S
    while pids := [int(pid) for pid in ip("netns", "pids", name).split()]:
        if time.monotonic() > end:
            raise LabError(f"{name}: expected its processes {pids} to end within {_END_S} s of SIGKILL, they did not")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    with contextlib.suppress(LabError):  # another lab may be removing the same
        ip("netns", "delete", name)
    if name in existing(name):
        raise LabError(f"{name}: expected `ip netns delete` to remove it, it is still there")


def remove_leftovers() -> list[str]:
    """Removes what labs left whose process is gone (killed, so that it could not); returns the names."""
    gone = []
    for name in existing():
        match = _NAME.fullmatch(name)
        assert match
        if started(int(match[1])) != int(match[2]):
            with contextlib.suppress(LabError):  # a namespace that another lab removed meanwhile
                remove(name)
            gone.append(name)
    return gone
