"""A row in real processes: fresh ones, forked from a process that has imported everything."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ranks
from linklab import Lab, LabError, LabUnavailable

from faults import judge
from faults.cases import Case
from faults.home import Home
from faults.rank import play
from faults.rows import cause

_ROW_DEADLINE_S = 75.0
_MBIT_PER_PEER = 4  # of a lab's links, so that every op lasts some tenths of a second


@dataclasses.dataclass
class Row:
    """A case and what came of it: PASS, FAIL or n/a, and why."""

    case: Case
    verdict: str
    reasons: list[str] = dataclasses.field(default_factory=list)
    late_s: float | None = None
    said: str = ""
    seconds: float = 0.0
    facts: list[Any] = dataclasses.field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Without an error's text and what each rank saw, unless the row failed."""
        row = dataclasses.asdict(self)
        if self.verdict != "FAIL":
            del row["facts"], row["said"]
        return {**row.pop("case"), **row}

    @staticmethod
    def from_json(row: dict[str, Any]) -> Row:
        """Reads the value that `to_json` returned."""
        case = Case(*(row[field.name] for field in dataclasses.fields(Case)))
        return Row(case, **{field.name: row[field.name] for field in dataclasses.fields(Row)[1:] if field.name in row})


class Runner:
    """Runs rows one after another; keeps the labs it made. A context manager."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._labs: dict[int, Lab] = {}

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, case: Case) -> Row:
        """One row. LabUnavailable where it needs a lab and there can be none."""
        if why := case.impossible():
            return Row(case, "n/a", [why])
        start = time.monotonic()
        allow = {case.culprit: -signal.SIGKILL} if case.fault == "kill -9" else None
        facts: list[Any] = []
        try:
            with self._home(case) as home:
                facts = ranks.run_ranks(play, case.size, case, home, timeout=_ROW_DEADLINE_S, allow_exit=allow)
            verdict = judge.judge(case, facts)
        except LabUnavailable:
            raise
        except (ranks.RanksFailed, LabError) as error:
            print(str(error)[-4000:], file=sys.stderr)  # where the ranks were: for who runs it, not for the JSON
            verdict = judge.Verdict(False, [cause(str(error))], None, "")
        seconds = time.monotonic() - start
        word = "PASS" if verdict.passed else "FAIL"
        return Row(case, word, verdict.reasons, verdict.late_s, verdict.said, seconds, facts)

    @contextlib.contextmanager
    def _home(self, case: Case) -> Iterator[Home | None]:
        """Where the ranks live: on loopback, or on the hosts of a lab whose last one's link they may have cut."""
        if not case.cut:
            yield None
            return
        if case.size not in self._labs:
            rate = f"{_MBIT_PER_PEER * (case.size - 1)}mbit"
            self._labs[case.size] = self._stack.enter_context(Lab(hosts=case.size, rate=rate))
        lab = self._labs[case.size]
        over = threading.Event()
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            thread = threading.Thread(target=_serve, args=(lab, case.culprit, Path(folder), over))
            thread.start()
            try:
                yield Home([lab.namespace(host) for host in range(case.size)], folder)
            finally:
                over.set()
                thread.join()
                lab.restore(case.culprit)


def _serve(lab: Lab, host: int, folder: Path, over: threading.Event) -> None:
    """Does what ranks ask for by notes: `cut`, `restore`."""
    for what, do in (("cut", lab.cut), ("restore", lab.restore)):
        while not (folder / what).exists():
            if over.wait(0.002):
                return
        do(host)
        (folder / f"{what}.done").touch()
