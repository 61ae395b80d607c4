"""Every fault of groups over transport="tcp", plain and with a secret.

    python benchmarks tcp_faults [--quick] [--only ROW…] [--jobs N] [--json FILE [--resume]]        # as root

Rows are fault,when,kind,secret,ranks. benchmarks/results/tcp_faults.md has the definitions.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import ranks
import report
from linklab.cli import EXIT_UNAVAILABLE
from linklab.errors import LabUnavailable
from linklab.tools import check, die_with_us

from faults.tcp import table
from faults.tcp.cases import Case, matrix, quick
from faults.tcp.run import Row, Runner


def parser() -> argparse.ArgumentParser:
    """Of the one command."""
    top = argparse.ArgumentParser(
        prog="tcp_faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--quick", action="store_true", help="a row of each fault")
    top.add_argument("--only", nargs="+", default=["*"], metavar="ROW", help="rows with wildcards: 'kill*,*,coded,*,4'")
    top.add_argument("--jobs", type=int, default=1, help="rows at a time (1); they mostly wait")
    top.add_argument("--json", type=Path, help="versions, machine, rows with their reasons, gates")
    top.add_argument(
        "--resume", action="store_true", help="rows that the JSON file has and did not fail are not run again"
    )
    top.add_argument("--list", action="store_true", help="the rows; runs nothing")
    return top


def chosen(patterns: Sequence[str], among: Sequence[Case]) -> list[Case]:
    """Rows that match one of the patterns, in their order. ValueError when a pattern matches none."""
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(case.name, pattern) for case in among):
            raise ValueError(
                f"--only: expected rows by fault,when,kind,secret,ranks, such as {among[0].name!r}, got {pattern!r}"
            )
    return [case for case in among if any(fnmatch.fnmatchcase(case.name, pattern) for pattern in patterns)]


def _work(cases: multiprocessing.Queue, rows: multiprocessing.Queue) -> None:
    die_with_us()
    try:
        with Runner() as runner:
            while (case := cases.get()) is not None:
                rows.put(runner.run(case))
    except BaseException as error:
        rows.put(f"{type(error).__name__}: {error}")
        raise
    finally:
        ranks.close_zygote()


def run(cases: Sequence[Case], jobs: int) -> Iterator[Row]:
    """Rows as they are done, in processes that share the work, but for those that are run alone, at the end."""
    alone = [case for case in cases if case.of.alone]
    yield from _run([case for case in cases if not case.of.alone], jobs)
    yield from _run(alone, 1)


def _run(cases: Sequence[Case], jobs: int) -> Iterator[Row]:
    """Rows as they are done. RuntimeError when one of the processes fails."""
    if not cases:
        return
    context = multiprocessing.get_context("spawn")
    todo, rows = context.Queue(), context.Queue()
    for case in cases:
        todo.put(case)
    workers = [context.Process(target=_work, args=(todo, rows)) for _ in range(jobs)]
    for worker in workers:
        todo.put(None)
        worker.start()
    try:
        for _ in cases:
            row = rows.get()
            if not isinstance(row, Row):
                raise RuntimeError(row)
            yield row
    finally:
        for worker in workers:
            worker.join(20)
            if worker.is_alive():
                worker.terminate()  # as Ctrl-C: a lab removes itself
                worker.join()


def gates(rows: Sequence[Row]) -> list[report.Gate]:
    """No row may fail."""
    return [report.Gate("rows that fail", sum(row.verdict == "FAIL" for row in rows), "==", 0)]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs rows; 1 when one fails, 2 for wrong arguments, 77 where no lab can be made."""
    top = parser()
    args = top.parse_args(argv)
    try:
        cases = chosen(args.only, list(quick() if args.quick else matrix()))
        if args.resume and not args.json:
            raise ValueError("--resume: expected --json with the file to go on with, got none")
        if args.jobs < 1:
            raise ValueError(f"--jobs: expected 1 or more, got {args.jobs}")
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

    def rows() -> list[Row]:
        return [done[case] for case in all_of if case in done]

    def content() -> dict[str, object]:
        return {"seconds": time.monotonic() - start, "rows": [row.to_json() for row in rows()]}

    try:
        check()
        for row in run(cases, args.jobs):
            done[row.case] = row
            print(table.line(row), file=sys.stderr, flush=True)
            if args.json and len(done) % 20 == 0:
                report.write_json(args.json, content(), gates(rows()))
    except LabUnavailable as error:
        print(f"tcp_faults: {error}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    except KeyboardInterrupt:
        print("# interrupted", file=sys.stderr)
    print(table.table(rows()))
    return report.finish(gates(rows()), args.json, content())
