"""A row over TCP in real processes on hosts of a lab, which are kept for the next row."""

from __future__ import annotations

import contextlib
import signal
import tempfile
import threading
import traceback
from typing import Any

import ranks
from linklab import LabError, LabUnavailable

from faults import rows
from faults.rows import Row
from faults.stage import Notes
from faults.tcp.acts import Act, direct, new_secrets
from faults.tcp.cases import KEPT_OUT, Case
from faults.tcp.judge import judge
from faults.tcp.outsiders import Ears
from faults.tcp.rank import play

__all__ = ["Row", "Runner"]

RATE = "40mbit"
_ROW_DEADLINE_S = 120.0


class Runner(rows.Runner):
    """Of groups over TCP."""

    def run(self, case: Case) -> Row:
        """See rows.Runner; a row is n/a where a lab needs a tool that is not there."""
        try:
            return super().run(case)
        except LabUnavailable as why:
            if case.of.tools:
                return Row(case, "n/a", [str(why)])
            raise

    def play(self, case: Case) -> tuple[list[str], dict[str, Any]]:
        """See rows.Runner. The lab has a host a rank, and one for who is no rank."""
        key = case.size, case.behind_router
        lab = self.lab(key, hosts=case.size + 1, rate=RATE, behind_router=case.behind_router)
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: lab.move(case.faulty, lab.address(case.faulty)))
            stack.callback(lab.restore, case.faulty)
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
        for note in ("struck", "over", "mended"):
            act.notes.say(note)
    finally:
        if act.ears:
            act.ears.close()
