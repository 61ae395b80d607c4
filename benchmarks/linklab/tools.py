"""The system's own tools that a lab stands on, run in the namespace where they belong."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from linklab.errors import LabError, LabUnavailable

TOOL_DEADLINE_S = 30
_PR_SET_PDEATHSIG = 1
_ADMINISTRATORS = "/usr/sbin:/sbin"  # where Debian has them, on no plain user's PATH
# linux/capability.h. Not the user's number: root in a container may have none of them.
_RIGHTS = {"CAP_NET_ADMIN": 12, "CAP_NET_RAW": 13, "CAP_SYS_ADMIN": 21}


def _effective_rights() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:"))


def _found(tool: str) -> str:
    path = shutil.which(tool) or shutil.which(tool, path=_ADMINISTRATORS)
    if path is None:
        package = "nftables" if tool == "nft" else "iproute2"
        raise LabUnavailable(f"a lab needs the tool {tool} (Debian: {package}), and there is none on PATH")
    return path


def check(*needed: str) -> None:
    """Raises LabUnavailable, in one sentence, where no lab can be made, or none with these tools too."""
    if sys.platform != "linux":
        raise LabUnavailable(f"a lab needs Linux's network namespaces, and this is {sys.platform}")
    for tool in ("ip", "tc", *needed):
        _found(tool)
    if missing := [name for name, bit in _RIGHTS.items() if not _effective_rights() >> bit & 1]:
        user = f"user {os.geteuid()}"
        raise LabUnavailable(f"a lab needs root, to make network namespaces; {user} lacks {' and '.join(missing)}")


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


def nft(rules: str, *, inside: str) -> None:
    """`nft` with rules, separated by ";", in a namespace."""
    call(["ip", "netns", "exec", inside, _found("nft"), rules])


def counters(device: str, *, inside: str) -> dict[str, Any]:
    """A device's statistics: {"rx": {"bytes", "packets", "dropped", …}, "tx": …}."""
    return json.loads(ip("-j", "-s", "link", "show", "dev", device, inside=inside))[0]["stats64"]


def die_with_us() -> None:
    """Run in a child before its program: it is killed when the thread that started it ends, however that may be."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def command_inside(namespace: str, command: list[str]) -> list[str]:
    """The command line that runs a command in a namespace, in the process that it is started as."""
    return [_found("ip"), "netns", "exec", namespace, *command]
