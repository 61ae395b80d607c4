"""The system's own tools that a lab stands on, run in the namespace where they belong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any

from linklab.errors import LabError, LabUnavailable

TOOL_DEADLINE_S = 30


def _found(tool: str) -> str:
    path = shutil.which(tool) or shutil.which(tool, path="/usr/sbin:/sbin")
    if path is None:
        raise LabUnavailable(f"a lab needs the tool {tool} (Debian: iproute2), and there is none on PATH")
    return path


def check() -> None:
    """Raises LabUnavailable, in one sentence, where no lab can be made."""
    if sys.platform != "linux":
        raise LabUnavailable(f"a lab needs Linux's network namespaces, and this is {sys.platform}")
    if os.geteuid() != 0:
        raise LabUnavailable(f"a lab needs root, to make network namespaces; this is user {os.geteuid()}")
    for tool in ("ip", "tc"):
        _found(tool)


def call(command: list[str]) -> str:
    """Runs a tool to its end and returns its output; LabError with what it said when it fails."""
    command = [_found(command[0]), *command[1:]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise LabError(f"`{' '.join(command)}`: expected an end within {TOOL_DEADLINE_S} s, there was none") from None
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).replace("\n", "; ")
        raise LabError(f"`{' '.join(command)}`: expected exit status 0, got {done.returncode}: {said}")
    return done.stdout


def ip(*words: str, inside: str | None = None) -> str:
    """`ip …`, in a namespace."""
    return call(["ip", *(("-n", inside) if inside else ()), *words])


def tc(*words: str, inside: str) -> str:
    """`tc …` in a namespace."""
    return call(["tc", "-n", inside, *words])


def counters(device: str, *, inside: str) -> dict[str, Any]:
    """A device's statistics: {"rx": {"bytes", "packets", "dropped", …}, "tx": …}."""
    return json.loads(ip("-j", "-s", "link", "show", "dev", device, inside=inside))[0]["stats64"]


def command_inside(namespace: str, command: list[str]) -> list[str]:
    """The command line that runs a command in a namespace, in the process that it is started as."""
    return [_found("ip"), "netns", "exec", namespace, *command]
