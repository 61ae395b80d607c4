"""A row in real processes on hosts of a lab, which are kept for the next row."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import tempfile
import threading
import time
import traceback
from typing import Any

import ranks
from linklab import Lab, LabError, LabUnavailable

from faults.rows import cause
from faults.tcp.acts import Act, direct, new_secrets
from faults.tcp.cases import KEPT_OUT, Case
from faults.tcp.judge import judge
from faults.tcp.outsiders import Ears
from faults.tcp.rank import play
from faults.tcp.stage import Notes

RATE = "40mbit"
_ROW_DEADLINE_S = 120.0


@dataclasses.dataclass
class Row:
    """A case and what came of it: PASS, FAIL or n/a, why, and numbers."""

    case: Case
    verdict: str
    reasons: list[str] = dataclasses.field(default_factory=list)
    seen: dict[str, Any] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """One flat object."""
        seen = {key: value for key, value in self.seen.items() if key not in ("struck", "over")}
        return {
            **dataclasses.asdict(self.case),
            "verdict": self.verdict,
            "reasons": self.reasons,
            **seen,
            "seconds": self.seconds,
        }

    @staticmethod
    def from_json(row: dict[str, Any]) -> Row:
        """Reads the value that `to_json` returned."""
        names = [field.name for field in dataclasses.fields(Case)]
        left = {key: value for key, value in row.items() if key not in (*names, "verdict", "reasons", "seconds")}
        return Row(Case(*(row[name] for name in names)), row["verdict"], row["reasons"], left, row["seconds"])


class Runner:
    """Runs rows one after another; keeps the labs it made. A context manager."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._labs: dict[tuple[int, tuple[int, ...]], Lab] = {}

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _lab(self, case: Case) -> Lab:
        """A host a rank, and one for who is no rank."""
        key = (case.size, case.behind_router)
        if key not in self._labs:
            lab = Lab(hosts=case.size + 1, rate=RATE, behind_router=case.behind_router)
            self._labs[key] = self._stack.enter_context(lab)
        return self._labs[key]

    def run(self, case: Case) -> Row:
        """One row. LabUnavailable where there can be no lab at all."""
        start = time.monotonic()
        try:
            lab = self._lab(case)
        except LabUnavailable as why:
            if case.of.tools:
                return Row(case, "n/a", [str(why)])
            raise
        reasons: list[str] = []
        seen: dict[str, Any] = {}
        try:
            reasons, seen = self._play(case, lab)
        except (ranks.RanksFailed, LabError) as error:
            reasons = [cause(str(error)), str(error)[-4000:]]
        finally:
            lab.restore(case.faulty)
            lab.move(case.faulty, lab.address(case.faulty))
        return Row(case, "FAIL" if reasons else "PASS", reasons, seen, time.monotonic() - start)

    def _play(self, case: Case, lab: Lab) -> tuple[list[str], dict[str, Any]]:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tcp-faults-"))
            notes = Notes(folder, tuple(lab.namespace(host) for host in range(lab.hosts)))
            act = Act(case, lab, notes)
            if case.secret == "secret" or case.of.faulty == 0:
                act.ears = stack.enter_context(Ears([lab.namespace(0)]))
            secrets = new_secrets(case)
            wrong: list[str] = []
            directing = threading.Thread(target=_direct, args=(act, wrong))
            if case.of.outcome != KEPT_OUT:
                directing.start()
            allow = {case.faulty: (0, -signal.SIGKILL)} if case.survivors < case.size else {}
            # A process that is no rank may be killed, or have nothing to say.
            allow |= {case.size + number: (0, -signal.SIGKILL) for number in range(len(case.others))}
            try:
                args = (case, notes, secrets, lab.address(case.size))
                facts = ranks.run_ranks(
                    play, case.size + len(case.others), *args, timeout=_ROW_DEADLINE_S, allow_exit=allow
                )
            except ranks.RanksFailed as error:
                raise LabError("\n".join([*wrong, str(error)])) from None
            finally:
                notes.say("stop")
                if case.of.outcome != KEPT_OUT:
                    directing.join()
            reasons = wrong + act.reasons + judge(case, facts[: case.size], act.seen, act.crowded)
            return reasons, act.seen


def _direct(act: Act, wrong: list[str]) -> None:
    try:
        direct(act)
    except Exception as error:
        wrong.append(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        act.notes.say("struck")
        act.notes.say("over")
        act.notes.say("mended")
    finally:
        if act.ears:
            act.ears.close()
