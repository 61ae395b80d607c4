"""The claims of `diloco_lab`."""

from __future__ import annotations

from typing import Any

from report import Gate

from diloco.lab_cases import equal_loss_claimed, fewer_bytes_claimed

SHARE = 0.93
LESS_EXPOSED, FEWER_BYTES, LOSS = 1 / 3, 8.0, 1.01  # next to torchft's
NEXT_TO_NOTHING = 0.01  # of an interval: where torchft is exposed for less, a third of it is no claim


def of_link(link: str, rows: list[dict[str, Any]], every: int, *, quick: bool) -> list[Gate]:
    """Of one link's rows: of those that are sold, and of all of ours the bytes; `quick`: those that short intervals show."""
    gates = []
    for row in rows:
        what = f"{link}: {row['name']}"
        if "fewer" in row and fewer_bytes_claimed(row["name"]):
            gates.append(Gate(f"{what}, {row['peer']}'s bytes / its", row["fewer"], ">=", FEWER_BYTES))
        if quick or not row["sold"]:
            continue
        gates.append(Gate(f"{what}, share of the speed without communication", row["share"], ">=", SHARE))
        if row["peer"]:
            gates.append(_exposed(what, row, every * row["step_s"]))
        if "loss_by_peer" in row and equal_loss_claimed(row["name"]):
            bound = LOSS + row["loss_error"]
            gates.append(
                Gate(f"{what}, loss / {row['peer']}'s, bound 1.01 + a standard error", row["loss_by_peer"], "<=", bound)
            )
    return gates


def _exposed(what: str, row: dict[str, Any], interval_s: float) -> Gate:
    if row["peer_exposed_s"] < NEXT_TO_NOTHING * interval_s:
        return Gate(f"{what}, exposed seconds / interval", row["exposed_s"] / interval_s, "<=", NEXT_TO_NOTHING)
    share = row["exposed_s"] / row["peer_exposed_s"]
    return Gate(f"{what}, exposed seconds / {row['peer']}'s", share, "<=", LESS_EXPOSED)
