"""Whether a row holds, from what its ranks saw."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from faults.cases import SLACK_S, Case

Facts = dict[str, Any]  # rank.Facts as a dict

TOO_LATE = "the fault came when the op was over"  # a reason


@dataclasses.dataclass
class Verdict:
    """PASS, or FAIL with every reason; `late_s` is the latest error after its deadline began to run, less the deadline."""

    passed: bool
    reasons: list[str]
    late_s: float | None
    said: str  # one of the errors


def named(case: Case, rank: int, attempt: int, message: str) -> list[str]:
    """Lists facts that an error lacks: the op, this rank and a peer, sequence number, group, bytes, time.

    A rank may hear of the group's end from an op that only says what the
    first cause was; that has all this in it then.
    """
    called = case.called(rank, attempt)
    op = "(send|recv)" if called == "send/recv" else called
    parts = [op, rf"rank {rank}\b", r"rank \d+.* and rank \d+|aborted by the program of rank \d+", r"sequence \d+"]
    parts += [r"group", r"bytes sent \d+, bytes received \d+", r"elapsed \d+\.\d+ s"]
    return [part for part in parts if not re.search(part, message)]


def _began(case: Case, facts: list[Facts | None], rank: int, index: int) -> float:
    """When the deadline of a rank's attempt began to run: it has called, the fault has come, all who call have."""
    mine = facts[rank]
    assert mine
    attempt = mine["attempts"][index]
    times = [attempt["called"], mine["resumed_at"]]
    times += [f["fault_at"] for f in facts if f]
    for other in facts:
        if other and len(other["attempts"]) > index:
            times.append(other["attempts"][index]["called"])
    return max(t for t in times if t <= attempt["ended"])


def judge(case: Case, facts: list[Facts | None]) -> Verdict:
    """`facts` in rank order, None for a rank that was killed."""
    reasons, late, said = [], [], ""
    for rank, mine in enumerate(facts):
        if mine is None:
            continue
        if mine["premature"]:
            reasons.append(mine["premature"])
        failed = [(i, a) for i, a in enumerate(mine["attempts"]) if a["error"]]
        for i, attempt in enumerate(mine["attempts"]):
            if attempt["equal"] is False:
                reasons.append(f"rank {rank}: op {i + 1} gave other bits than undisturbed")
            if attempt["residual"] and attempt["residual"] != ("kept" if attempt["error"] else "committed"):
                reasons.append(
                    f"rank {rank}: its residual is {attempt['residual']} after {attempt['error'] or 'success'}"
                )
        if case.recovers:
            reasons += [f"rank {rank}: {a['error']}: {a['message'][:300]}" for _, a in failed]
        elif not failed:
            reasons.append(f"rank {rank}: no error")
        for i, attempt in failed if not case.recovers else []:
            said = attempt["message"]
            if attempt["error"] != "DistBackendError":
                reasons.append(f"rank {rank}: expected a DistBackendError, got {attempt['error']}: {said[:300]}")
            if missing := named(case, rank, i, said):
                reasons.append(f"rank {rank}: no {missing} in: {said[:300]}")
            late.append(attempt["ended"] - _began(case, facts, rank, i) - case.deadline_s)
            if late[-1] > SLACK_S:
                reasons.append(f"rank {rank}: its error came {late[-1]:.1f} s after the deadline")
        expected = "equal" if case.survivors == case.size else "right"
        if mine["went_on"] != expected:
            reasons.append(f"rank {rank}: expected the next group to be {expected}, got {mine['went_on']!r}")
    if case.needs_lab and case.when == "during" and not _was_during(facts):
        reasons.append(TOO_LATE)
    return Verdict(not reasons, reasons, max(late, default=None), said)


def _was_during(facts: list[Facts | None]) -> bool:
    known = [mine for mine in facts if mine]
    cut = max(mine["fault_at"] for mine in known)
    return cut < max(mine["attempts"][0]["ended"] for mine in known)
