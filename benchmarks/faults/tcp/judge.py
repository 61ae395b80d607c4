"""Whether a row holds, from what its ranks and the lab's owner saw."""

from __future__ import annotations

import re
import statistics
from typing import Any

from faults.tcp.cases import GOES_ON, KEPT_OUT, MOST_SLOWER, MOST_TIMES, SLACK_S, Case

Facts = dict[str, Any]  # rank.Facts as a dict


def judge(case: Case, facts: list[Facts | None], seen: dict[str, Any], crowded: list[tuple[float, float]]) -> list[str]:
    """Reasons why the row fails; puts its numbers into `seen`. `facts` in rank order, None for a rank that was killed."""
    outcome = case.of.outcome
    rank_reasons = _kept_out if outcome == KEPT_OUT else _goes_on if outcome == GOES_ON else _fails
    reasons = []
    for rank, mine in enumerate(facts):
        if mine is None:
            if case.survivors == case.size:
                reasons.append(f"rank {rank}: expected it to live")
            continue
        if mine["wrong"]:
            reasons.append(
                f"rank {rank}: {mine['wrong']} results of {len(mine['ops'])} have other bits than undisturbed"
            )
        reasons += [f"rank {rank}: {why}" for why in rank_reasons(case, rank, mine, seen)]
        seen["again_s"] = max(seen.get("again_s", 0.0), mine["again_s"])
        if outcome != KEPT_OUT and not mine["went_on"]:
            reasons.append(f"rank {rank}: expected the next group to work")
    if outcome == GOES_ON and _held_up(case) and seen.get("pause_s", 0.0) < -_held_up(case) / 2:
        reasons.append(f"the fault held no op up: none took {_held_up(case):g} s more than undisturbed")
    if crowded and facts[0]:
        reasons += _crowd(facts[0], seen, crowded)
    return reasons


def _held_up(case: Case) -> float:
    """For how long an op must have waited, or little less."""
    return case.of.lasts_s if case.when != "after" else 0.0


def _goes_on(case: Case, rank: int, mine: Facts, seen: dict[str, Any]) -> list[str]:
    if mine["error"]:
        return [f"expected no error, got {mine['error']}: {mine['message'][:400]}"]
    reasons = []
    usual = max(took for _, _, took in mine["ops"][: mine["undisturbed"]])
    longest = max(took for _, _, took in mine["ops"][mine["undisturbed"] :])
    # As long as it did last; where ops came "after", it was over when they were called.
    lasts_s = seen["over"] - seen["struck"] if _held_up(case) else 0.0
    pause = longest - usual - lasts_s
    seen["pause_s"] = max(seen.get("pause_s", -1e9), pause)
    seen["making_s"] = max(seen.get("making_s", 0.0), mine["making_s"])
    seen["made"] = seen.get("made", 0) + mine["made"]
    if pause > case.of.pause_s:
        reasons.append(f"an op took {longest:.2f} s, undisturbed {usual:.2f} s, the fault {lasts_s:.2f} s")
    if case.of.outside and mine["made"]:
        reasons.append(f"{mine['made']} connections were made again")
    if rank in case.relayed and not any(path.startswith("relay ") for path in mine["paths"]):
        reasons.append(f"expected to reach rank {case.relayed[rank == 0]} by a relay, got {mine['paths']}")
    return reasons


def _fails(case: Case, rank: int, mine: Facts, seen: dict[str, Any]) -> list[str]:
    if not mine["error"]:
        return ["expected an error, got none"]
    said = mine["message"]
    reasons = (
        []
        if mine["error"] == "DistBackendError"
        else [f"expected a DistBackendError, got {mine['error']}: {said[:300]}"]
    )
    seen["said"] = said
    wanted = [
        r"(all_reduce|all_gather|reduce_scatter|send|recv|barrier)",
        r"sequence \d+",
        r"elapsed \d+\.\d+ s",
        r"rank \d+.* and rank \d+|aborted by the program of rank \d+|rank \d+.*gave",
    ]
    if rank != case.faulty:
        wanted.append(rf"rank {case.faulty}\b")
    missing = [one for one in wanted if not re.search(one, said, re.DOTALL)]
    if missing:
        reasons.append(f"no {missing} in: {said[:400]}")
    # The deadline runs from the op's call, and begins anew with every byte that comes.
    if rank != case.faulty:
        late = mine["ended"] - max(seen["struck"], mine["called"])
        seen["late_s"] = max(seen.get("late_s", 0.0), late)
        if late > case.of.deadline_s + SLACK_S:
            reasons.append(f"its error came {late:.1f} s after the fault, the deadline is {case.of.deadline_s:g} s")
    return reasons


def _kept_out(case: Case, rank: int, mine: Facts, seen: dict[str, Any]) -> list[str]:
    if not mine["error"]:
        return ["expected that no group is made"]
    seen["said"] = said = mine["message"]
    late = mine["ended"] - mine["called"]
    seen["late_s"] = max(seen.get("late_s", 0.0), late)
    reasons = [] if late <= case.of.deadline_s + SLACK_S else [f"its error came after {late:.1f} s"]
    what = "secret differs" if case.fault == "made without a secret" else "got another secret there"
    if what not in said or not re.search(rf"rank {case.faulty if rank != case.faulty else 0}\b", said):
        reasons.append(f"expected an error that names {what!r} and the rank, got {said[:400]}")
    return reasons


def _crowd(mine: Facts, seen: dict[str, Any], crowded: list[tuple[float, float]]) -> list[str]:
    """Ops next to strangers, relative to the median of the same op without."""
    alone: dict[str, list[float]] = {}
    beside: list[tuple[str, float]] = []
    first: list[tuple[str, float]] = []  # of those without, before the crowd came
    for op, called, took in mine["ops"][mine["undisturbed"] :]:
        if any(called < end and called + took > begin for begin, end in crowded):
            beside.append((op, took))
        else:
            alone.setdefault(op, []).append(took)
            if called < crowded[0][0]:
                first.append((op, took))
    times = [took / statistics.median(alone[op]) for op, took in beside if op in alone]
    seen["slower"], seen["worst"] = statistics.median(times), max(times)
    # How far ops without strangers are from themselves: what "slower" may be by chance.
    seen["before"] = statistics.median(took / statistics.median(alone[op]) for op, took in first)
    reasons = []
    if seen["slower"] > MOST_SLOWER:
        reasons.append(f"ops took {seen['slower']:.3f} times as long next to strangers, at the median")
    if seen["worst"] > MOST_TIMES:
        reasons.append(f"an op took {seen['worst']:.2f} times as long next to strangers")
    return reasons
