"""The claims of `diloco_lab`."""

from __future__ import annotations

from typing import Any

from report import Gate

from diloco.lab_cases import fewer_bytes_claimed

SHARE = 0.93
LESS_EXPOSED, FEWER_BYTES, LOSS = 1 / 3, 8.0, 1.01  # next to torchft's
BYTES, QUICK_BYTES = 1.01, 1.05  # sent by format, for frame headers, of which short messages have more


def of_link(link: str, rows: list[dict[str, Any]], *, quick: bool) -> list[Gate]:
    """Of one link's rows: of those that are sold, and of all of ours the bytes; `quick`: those that short intervals show."""
    gates, most = [], QUICK_BYTES if quick else BYTES
    for row in rows:
        what = f"{link}: {row['name']}"
        if "by_format" in row:
            gates.append(Gate(f"{what}, bytes by the library / by the format", row["by_format"], "<=", most))
        if "fewer" in row and fewer_bytes_claimed(row["name"]):
            gates.append(Gate(f"{what}, {row['peer']}'s bytes / its", row["fewer"], ">=", FEWER_BYTES))
        if quick or not row["sold"]:
            continue
        gates.append(Gate(f"{what}, share of the speed without communication", row["share"], ">=", SHARE))
        if row["peer"]:
            gates.append(Gate(f"{what}, exposed seconds / {row['peer']}'s", row["exposed_by_peer"], "<=", LESS_EXPOSED))
        if "loss_by_peer" in row:
            bound = LOSS + row["loss_error"]
            gates.append(
                Gate(f"{what}, loss / {row['peer']}'s, bound 1.01 + a standard error", row["loss_by_peer"], "<=", bound)
            )
    return gates
