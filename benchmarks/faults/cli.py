"""The command line: which rows, how many at a time, and the table."""

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

from faults import table
from faults.cases import Case, matrix
from faults.run import Row, Runner


def parser() -> argparse.ArgumentParser:
    """Of the one command."""
    top = argparse.ArgumentParser(prog="faults", description="Every op with every fault; cut links need root.")
    top.add_argument(
        "--only",
        nargs="+",
        default=["*"],
        metavar="ROW",
        help="rows by op,kind,fault,when,ranks with wildcards: 'all_*,compressed,kill*,*,4'",
    )
    top.add_argument("--jobs", type=int, default=1, help="rows at a time (1); they mostly wait")
    top.add_argument("--json", type=Path, help="versions, machine, rows with their reasons and errors, gates")
    top.add_argument(
        "--resume", action="store_true", help="rows that the JSON file has and did not fail are not run again"
    )
    top.add_argument("--list", action="store_true", help="the rows and why some are n/a; runs nothing")
    return top


def chosen(patterns: Sequence[str]) -> list[Case]:
    """Rows that match one of the patterns, in the matrix' order. ValueError when a pattern matches none."""
    rows = list(matrix())
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(case.name, pattern) for case in rows):
            raise ValueError(
                f"--only: expected rows by op,kind,fault,when,ranks, such as {rows[0].name!r}, got {pattern!r}"
            )
    return [case for case in rows if any(fnmatch.fnmatchcase(case.name, pattern) for pattern in patterns)]


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
    """Rows as they are done, in processes that share the work. RuntimeError when one of them fails."""
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
            worker.join(10)
            if worker.is_alive():
                worker.terminate()  # as Ctrl-C: a lab removes itself
                worker.join()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs rows; 1 when one fails, 2 for wrong arguments, 77 where links are to be cut and no lab can be made."""
    top = parser()
    args = top.parse_args(argv)
    try:
        cases = chosen(args.only)
        if args.resume and not args.json:
            raise ValueError("--resume: expected --json with the file to go on with, got none")
        if args.jobs < 1:
            raise ValueError(f"--jobs: expected 1 or more, got {args.jobs}")
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
        for row in run(cases, args.jobs):
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
    rows = in_order(done)
    print(table.table(rows))
    if args.json:
        write(args.json, rows, start)
    return report.finish(gates(rows), None, {})


def gates(rows: Sequence[Row]) -> list[report.Gate]:
    """No row may fail."""
    return [report.Gate("rows that fail", sum(row.verdict == "FAIL" for row in rows), "==", 0)]


def in_order(done: dict[Case, Row]) -> list[Row]:
    """Of the matrix."""
    return [done[case] for case in matrix() if case in done]


def earlier(path: Path) -> list[Row]:
    """Rows of a JSON file; none where there is no file yet."""
    return [Row.from_json(row) for row in json.loads(path.read_text())["rows"]] if path.exists() else []


def write(path: Path, rows: Sequence[Row], start: float) -> None:
    """Prints the rows that are known so far."""
    content = {"seconds": time.monotonic() - start, "rows": [row.to_json() for row in rows]}
    report.write_json(path, content, gates(rows))
