"""The process that delays and loses frames (forward.cpp), compiled on first use."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from linklab.errors import LabError, LabUnavailable
from linklab.link import Link
from linklab.tools import command_inside, counters, die_with_us

_SOURCE = Path(__file__).with_name("forward.cpp")
_BUILD = Path(__file__).resolve().parents[2] / "build" / "linklab"
_COMPILE_S = 120


def program() -> Path:
    """The compiled forwarder; kept by the hash of its source. LabUnavailable without a compiler."""
    binary = _BUILD / f"forward-{hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]}"
    if binary.exists():
        return binary
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if not compiler:
        raise LabUnavailable(
            "delay and loss need a C++20 compiler (CXX, c++, g++ or clang++), and there is none on PATH"
        )
    _BUILD.mkdir(parents=True, exist_ok=True)
    # Moved into place when it is whole: another lab may be doing the same.
    part = binary.with_suffix(f".{os.getpid()}")
    command = [*compiler.split(), "-std=c++20", "-O2", "-Wall", "-Wextra", "-o", str(part), str(_SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_S)
    if done.returncode != 0:
        raise LabUnavailable(
            f"expected `{' '.join(command)}` to compile, it ended with {done.returncode}: {done.stderr}"
        )
    part.rename(binary)
    return binary


class Forwarder:
    """Runs between hosts' links and the switch until close(). Its devices exist: wire<host>, and tap<host> for the bridge."""

    def __init__(self, switch: str, links: Mapping[int, Link]) -> None:
        arguments = []
        for host, link in links.items():
            arguments += [f"wire{host}", f"tap{host}", f"{link.delay_s * 1e6:.0f}", f"{link.loss * 1e9:.0f}", str(host)]
        self._switch, self._hosts = switch, list(links)
        self._process = subprocess.Popen(
            command_inside(switch, [str(program()), *arguments]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=die_with_us,
        )
        if self._line() != "ready":
            said = self._process.stderr.read() if self._process.stderr else ""
            raise LabUnavailable(f"the forwarder of delayed frames did not start: {said.strip()}")

    def _line(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline().strip()

    def counts(self) -> dict[str, int]:
        """Frames so far, of all hosts: {"forwarded", "lost" (on purpose), "dropped" (for want of time or memory)}."""
        assert self._process.stdin
        try:
            self._process.stdin.write("?")
            self._process.stdin.flush()
            forwarded, lost, dropped = map(int, self._line().split())
        except (BrokenPipeError, ValueError):
            raise LabError(f"the forwarder of delayed frames ended with {self._process.poll()}") from None
        # Frames for which its taps' queues have no room are lost before it sees them.
        dropped += sum(counters(f"tap{host}", inside=self._switch)["tx"]["dropped"] for host in self._hosts)
        return {"forwarded": forwarded, "lost": lost, "dropped": dropped}

    def drops(self) -> int:
        """Frames lost against orders."""
        return self.counts()["dropped"]

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream:
                stream.close()
