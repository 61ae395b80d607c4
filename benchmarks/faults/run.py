"""A row of the matrix in real processes: fresh ones, forked from a process that has imported everything."""

from __future__ import annotations

import contextlib
import signal
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import ranks
from linklab import Lab

from faults import judge, rows
from faults.cases import Case
from faults.rank import play
from faults.stage import Notes

_ROW_DEADLINE_S = 75.0
_MBIT_PER_PEER = 4  # of a lab's links, so that every op lasts some tenths of a second


class Runner(rows.Runner):
    """Of the matrix."""

    def play(self, case: Case) -> tuple[list[str], dict[str, Any]]:
        """See rows.Runner."""
        allow = {case.culprit: -signal.SIGKILL} if case.fault == "kill -9" else None
        with self._notes(case) as notes:
            facts = ranks.run_ranks(play, case.size, case, notes, timeout=_ROW_DEADLINE_S, allow_exit=allow)
        verdict = judge.judge(case, facts)
        return verdict.reasons, {"late_s": verdict.late_s, "said": verdict.said, "facts": facts}

    @contextlib.contextmanager
    def _notes(self, case: Case) -> Iterator[Notes | None]:
        """Where the ranks live: None on loopback, or the hosts of a lab whose last one's link they may have cut."""
        if not case.needs_lab:
            yield None
            return
        lab = self.lab(case.size, hosts=case.size, rate=f"{_MBIT_PER_PEER * (case.size - 1)}mbit")
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            notes = Notes(folder, tuple(lab.namespace(host) for host in range(case.size)))
            thread = threading.Thread(target=_serve, args=(lab, case.culprit, notes))
            thread.start()
            try:
                yield notes
            finally:
                notes.say("stop")
                thread.join()
                lab.restore(case.culprit)


def _serve(lab: Lab, host: int, notes: Notes) -> None:
    """Does what ranks ask for by notes: `cut`, `restore`."""
    with contextlib.suppress(TimeoutError):  # the row is over
        for what, do in (("cut", lab.cut), ("restore", lab.restore)):
            notes.wait(what)
            do(host)
            notes.say(f"{what}.done")
