"""The rows as text."""

from __future__ import annotations

from diloco import memory
from diloco.measure import Row


def of_link(rows: list[Row]) -> str:
    """A line a case."""
    first = rows[0]
    lines = [
        f"# {first.rate}: an inner step takes {first.step_s:.3f} s, both ranks {first.speed:.0f} tokens/s",
        f"# {'case':<24}{'share':>7}{'MB sent':>9}{'/format':>9}{'link s':>8}{'fits':>6}{'wait s':>8}{'local s':>9}"
        f"{'coding s':>10}{'others s':>10}{'own %':>7}{'loss':>8}",
    ]
    for row in rows:
        by_format = f"{row.wire / row.payload:.4f}" if row.payload else "-"
        fits = "-" if row.fits is None else "yes" if row.fits else "no"
        lines.append(
            f"  {row.name:<24}{row.share:>7.3f}{row.sent / 1e6:>9.3f}{by_format:>9}{row.message_s:>8.3f}{fits:>6}"
            f"{row.waited_s:>8.3f}{row.local_s:>9.4f}{row.coding_s:>10.4f}{row.others_cpu_s:>10.4f}"
            f"{100 * row.local_share:>7.2f}{row.loss:>8.4f}"
        )
    return "\n".join(lines)


def of_memory(rows: list[memory.Row]) -> str:
    """A line a case."""
    lines = [f"# {'bytes a parameter':<32}{'resident':>10}{'formula':>9}{'peak':>8}"]
    lines += [f"  {row.name:<32}{row.resident:>10.2f}{row.formula:>9.2f}{row.peak:>8.2f}" for row in rows]
    return "\n".join(lines)
