"""Every fault of groups over transport="tcp", plain and with a secret.

    python benchmarks tcp_faults [--quick] [--only ROW…] [--jobs N] [--json FILE [--resume]]        # as root

Rows are fault,when,kind,secret,ranks. benchmarks/results/tcp_faults.md has the definitions.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence

import report
from linklab.cli import EXIT_UNAVAILABLE
from linklab.errors import LabUnavailable
from linklab.tools import check

from faults import rows
from faults.tcp import table
from faults.tcp.cases import Case, matrix, quick
from faults.tcp.run import Row, Runner

_COLUMNS = "fault,when,kind,secret,ranks"


def parser() -> argparse.ArgumentParser:
    """Of the one command."""
    top = argparse.ArgumentParser(
        prog="tcp_faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--quick", action="store_true", help="a row of each fault")
    rows.add_options(top, f"rows by {_COLUMNS} with wildcards: 'kill*,*,coded,*,4'")
    return top


def chosen(patterns: Sequence[str], among: Sequence[Case]) -> list[Case]:
    """Rows that match one of the patterns, in their order. ValueError when a pattern matches none."""
    return rows.chosen(patterns, among, _COLUMNS)


def run(cases: Sequence[Case], jobs: int) -> Iterator[Row]:
    """Rows as they are done, but for those that are run alone, at the end. RuntimeError when a process fails."""
    yield from rows.run(Runner, [case for case in cases if not case.of.alone], jobs)
    yield from rows.run(Runner, [case for case in cases if case.of.alone], 1)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs rows; 1 when one fails, 2 for wrong arguments, 77 where no lab can be made."""
    top = parser()
    args = top.parse_args(argv)
    try:
        cases = chosen(args.only, list(quick() if args.quick else matrix()))
        rows.check_options(args)
    except ValueError as error:
        top.error(str(error))
    if args.list:
        print("\n".join(case.name for case in cases))
        return 0
    all_of = list(quick() if args.quick else matrix())
    print(
        report.heading("tcp_faults", rows=f"{len(cases)} of {len(all_of)}", jobs=args.jobs, quick=args.quick),
        flush=True,
    )
    done: dict[Case, Row] = {}
    if args.resume and args.json.exists():
        earlier = map(Row.from_json, json.loads(args.json.read_text())["rows"])
        done = {row.case: row for row in earlier if row.verdict == "PASS"}
        cases = [case for case in cases if case not in done]
    start = time.monotonic()

    def found() -> list[Row]:
        return [done[case] for case in all_of if case in done]

    def content() -> dict[str, object]:
        return {"seconds": time.monotonic() - start, "rows": [row.to_json() for row in found()]}

    try:
        check()
        for row in run(cases, args.jobs):
            done[row.case] = row
            print(table.line(row), file=sys.stderr, flush=True)
            if args.json and len(done) % 20 == 0:
                report.write_json(args.json, content(), rows.gates(found()))
    except LabUnavailable as error:
        print(f"tcp_faults: {error}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    except KeyboardInterrupt:
        print("# interrupted", file=sys.stderr)
    print(table.table(found()))
    return report.finish(rows.gates(found()), args.json, content())
