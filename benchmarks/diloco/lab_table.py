"""The rows of `diloco_lab`, each next to its peer, and as text."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from diloco import lab_losses
from diloco.lab_cases import Setting, peer_of, sold
from diloco.measure import Row


def rows_of(measured: list[Row], losses: dict[str, list[float]], setting: Setting) -> list[dict[str, Any]]:
    """Every row as the JSON has it.

    Returns:
        The fields of `Row` but its loss, which is that of a turn; `share_least` and `share_most`; `sold`; of ours `own`, the
        outer step's work / 100 inner steps; `peer`, and of those that have one `fewer` (its bytes / these) and
        `peer_exposed_s`; where both were trained `loss`, `loss_by_peer` and its standard error `loss_error`.
    """
    named = {row.name: row for row in measured}
    found = []
    for row in measured:
        fields = {name: value for name, value in dataclasses.asdict(row).items() if name != "loss"}
        fields |= {"share_least": min(row.shares), "share_most": max(row.shares), "sold": sold(row, setting.every)}
        if row.payload:
            fields["own"] = row.local_share
        name = peer_of(row.name)
        fields["peer"] = name if name in named else None
        if fields["peer"]:
            peer = named[name]
            fields["fewer"] = peer.sent / row.sent
            fields["peer_exposed_s"] = peer.exposed_s
        if row.name in losses:
            fields["loss"] = statistics.mean(losses[row.name])
            if fields["peer"] in losses:
                fields |= lab_losses.ratio(losses[row.name], losses[name])
        found.append(fields)
    return found


def of_link(sites: int, rate: str, rows: list[dict[str, Any]]) -> str:
    """A line a case."""
    first = rows[0]
    lines = [
        f"# {sites} sites, {rate}: an inner step takes {first['step_s']:.3f} s, all sites {first['speed']:.0f} tokens/s",
        f"# {'case':<24}{'sold':>5}{'share':>7}{'least':>7}{'most':>7}{'MB sent':>9}{'fewer':>8}{'link s':>8}{'exposed s':>11}"
        f"{'wait s':>8}{'own %':>7}{'loss':>8}{'/ peer':>8}{'+-':>7}",
    ]
    for row in rows:
        fewer, loss, by_peer, error = (
            f"{row[name]:.{digits}f}" if name in row else "-"
            for name, digits in (("fewer", 1), ("loss", 4), ("loss_by_peer", 4), ("loss_error", 4))
        )
        own = f"{100 * row['own']:.2f}" if "own" in row else "-"
        lines.append(
            f"  {row['name']:<24}{'yes' if row['sold'] else '-':>5}{row['share']:>7.3f}{row['share_least']:>7.3f}"
            f"{row['share_most']:>7.3f}{row['sent'] / 1e6:>9.3f}{fewer:>8}{row['message_s']:>8.3f}{row['exposed_s']:>11.3f}"
            f"{row['waited_s']:>8.3f}{own:>7}{loss:>8}{by_peer:>8}{error:>7}"
        )
    return "\n".join(lines)


def of_losses(sites: int, losses: dict[str, list[float]]) -> str:
    """A line a case."""
    lines = [f"# {sites} sites: loss{'':<12}{'mean':>8}  of every seed"]
    for name, found in losses.items():
        lines.append(f"  {name:<24}{statistics.mean(found):>8.4f}  {' '.join(f'{loss:.4f}' for loss in found)}")
    return "\n".join(lines)
