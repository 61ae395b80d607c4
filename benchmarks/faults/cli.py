"""The command line: which rows, how many at a time, and the table."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import report
from linklab.cli import EXIT_UNAVAILABLE
from linklab.errors import LabUnavailable
from linklab.tools import check

from faults import rows, table
from faults.cases import Case, matrix
from faults.run import Row, Runner

_COLUMNS = "op,kind,fault,when,ranks"


def parser() -> argparse.ArgumentParser:
    """Of the one command."""
    top = argparse.ArgumentParser(prog="faults", description="Every op with every fault; cut links need root.")
    rows.add_options(top, f"rows by {_COLUMNS} with wildcards: 'all_*,compressed,kill*,*,4'")
    return top


def chosen(patterns: Sequence[str]) -> list[Case]:
    """Rows of the matrix that match one of the patterns, in its order. ValueError when a pattern matches none."""
    return rows.chosen(patterns, list(matrix()), _COLUMNS)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs rows; 1 when one fails, 2 for wrong arguments, 77 where links are to be cut and no lab can be made."""
    top = parser()
    args = top.parse_args(argv)
    try:
        cases = chosen(args.only)
        rows.check_options(args)
    except ValueError as error:
        top.error(str(error))
    if args.list:
        for case in cases:
            print(f"{case.name}{'  n/a: ' if case.impossible() else ''}{case.impossible()}")
        return 0
    print(report.heading("faults", rows=f"{len(cases)} of {len(list(matrix()))}", jobs=args.jobs), flush=True)
    done: dict[Case, Row] = {}
    if args.resume:
        done = {row.case: row for row in earlier(args.json) if row.verdict != "FAIL"}
        cases = [case for case in cases if case not in done]
    start = time.monotonic()
    try:
        if any(case.cut for case in cases):
            check()
        for row in rows.run(Runner, cases, args.jobs):
            done[row.case] = row
            if row.verdict != "n/a":
                print(table.line(row), flush=True)
            if args.json and len(done) % 20 == 0:
                write(args.json, in_order(done), start)
    except LabUnavailable as error:
        print(f"faults: {error}; rows without a cut link need none: --only '*,kill*' …", file=sys.stderr)
        return EXIT_UNAVAILABLE
    except KeyboardInterrupt:
        print("# interrupted", file=sys.stderr)
    found = in_order(done)
    print(table.table(found))
    if args.json:
        write(args.json, found, start)
    return report.finish(rows.gates(found), None, {})


def in_order(done: dict[Case, Row]) -> list[Row]:
    """Of the matrix."""
    return [done[case] for case in matrix() if case in done]


def earlier(path: Path) -> list[Row]:
    """Rows of a JSON file; none where there is no file yet."""
    return [Row.from_json(row) for row in json.loads(path.read_text())["rows"]] if path.exists() else []


def write(path: Path, found: Sequence[Row], start: float) -> None:
    """Prints the rows that are known so far."""
    content = {"seconds": time.monotonic() - start, "rows": [row.to_json() for row in found]}
    report.write_json(path, content, rows.gates(found))
