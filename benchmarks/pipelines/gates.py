"""The claims about the rows."""

from __future__ import annotations

from linklab.link import goodput_bits, parse_bits
from linklab.validate import GOODPUT_WITHIN
from report import Gate

from pipelines import cases
from pipelines.measure import Measured, Row

BOUND = 1.15  # of the simulated bound
OVER_TORCH = {("GPipe", "25ms"): 0.50, ("1F1B", "25ms"): 0.85, ("GPipe", ""): 1.05, ("1F1B", ""): 1.05}
GATED_RATE = "100mbit"  # of the claims against torch
FASTER = {"fw4bw8": 4.7, "fw3bw6": 6.2, "fw2bw4": 8.5}
DIRECT, FILE = 1.03, 1.05
FOUR_BITS_AHEAD = 1.0  # 1F1B with more under way / 1F1B, where there is a delay


def of_link(setting: cases.Setting, measured: Measured) -> list[Gate]:
    """Of one link's rows."""
    ours = [row for row in measured.rows if row.ours]
    gates = [Gate(f"{setting.link}: largest step / bound, of all ways", max(row.ratio for row in ours), "<=", BOUND)]
    if setting.carried:
        share = measured.goodput_bits / goodput_bits(parse_bits(setting.rate) or 0)
        gates.append(Gate(f"{setting.link}: a TCP stream's rate / the link's", share, ">=", 1 - GOODPUT_WITHIN))
    gates.append(Gate(f"{setting.link}: frames that the lab lost", measured.frames_lost, "==", 0))
    if setting.rate == GATED_RATE:
        for (schedule, delay), least in OVER_TORCH.items():
            if delay == setting.delay:
                name = f"{setting.link}, {schedule}, 4 bits: step / torch's over the same codes"
                gates += _ratio(measured, name, (cases.DIRECT, schedule), (cases.TORCH_CODED, schedule), least)
        pairs = {
            "changes / direct, gauss2": (cases.CHANGES_2, cases.DIRECT_2, DIRECT),
            "changes / direct, gauss4": (cases.CHANGES_4, cases.DIRECT, DIRECT),
            "a file's step / RAM's": (cases.IN_A_FILE, cases.CHANGES_2, FILE),
        }
        for name, (mine, other, most) in pairs.items():
            gates += _ratio(measured, f"{setting.link}: {name}", (mine, "GPipe"), (other, "GPipe"), most)
        if setting.delay:
            ahead = f"1F1B +{cases.AHEAD}"
            name = f"{setting.link}, 4 bits: {ahead} / 1F1B"
            gates += _ratio(measured, name, (cases.DIRECT, ahead), (cases.DIRECT, "1F1B"), FOUR_BITS_AHEAD)
    return gates


def of_slow_messages(measured: Measured) -> list[Gate]:
    """Of the rows whose exact messages take longest."""
    rows = {row.name: row for row in measured.rows}
    exact = rows[cases.EXACT].seconds
    gates = [
        Gate(f"slow messages: exact step / {name}'s", exact / rows[name].seconds, ">=", least)
        for name, least in FASTER.items()
    ]
    most = max(row.ratio for row in measured.rows)
    return [*gates, Gate("slow messages: largest step / bound", most, "<=", BOUND)]


def _ratio(measured: Measured, name: str, mine: tuple[str, str], other: tuple[str, str], most: float) -> list[Gate]:
    """A case's seconds by another's; nothing where one of them was left out."""
    rows: dict[tuple[str, str], Row] = {(row.name, row.order): row for row in measured.rows}
    if mine not in rows or other not in rows:
        return []
    return [Gate(name, rows[mine].seconds / rows[other].seconds, "<=", most)]
