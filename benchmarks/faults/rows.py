"""Rows of a table of faults: which are wanted, and their runs in processes that share the work."""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import multiprocessing
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ranks
import report
from linklab.tools import die_with_us

_END_S = 20  # for a process to end its labs


def add_options(parser: argparse.ArgumentParser, only: str) -> None:
    """Adds the options of all tables. `only`: the help of --only."""
    parser.add_argument("--only", nargs="+", default=["*"], metavar="ROW", help=only)
    parser.add_argument("--jobs", type=int, default=1, help="rows at a time (1); they mostly wait")
    parser.add_argument("--json", type=Path, help="versions, machine, rows with their reasons, gates")
    parser.add_argument(
        "--resume", action="store_true", help="rows that the JSON file has and did not fail are not run again"
    )
    parser.add_argument("--list", action="store_true", help="the rows; runs nothing")


def check_options(args: argparse.Namespace) -> None:
    """Raises ValueError for options that do not go together."""
    if args.resume and not args.json:
        raise ValueError("--resume: expected --json with the file to go on with, got none")
    if args.jobs < 1:
        raise ValueError(f"--jobs: expected 1 or more, got {args.jobs}")


def chosen(patterns: Sequence[str], among: Sequence[Any], columns: str) -> list[Any]:
    """Cases that match one of the patterns, in their order. ValueError when a pattern matches none.

    Args:
        patterns: Of names, with wildcards.
        among: Cases; each has a name.
        columns: The parts of a name, for the error.
    """
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(case.name, pattern) for case in among):
            raise ValueError(f"--only: expected rows by {columns}, such as {among[0].name!r}, got {pattern!r}")
    return [case for case in among if any(fnmatch.fnmatchcase(case.name, pattern) for pattern in patterns)]


def _work(make: Callable[[], Any], cases: multiprocessing.Queue, rows: multiprocessing.Queue) -> None:
    die_with_us()
    try:
        with make() as runner:
            while (case := cases.get()) is not None:
                rows.put(runner.run(case))
    except BaseException as error:
        rows.put(f"{type(error).__name__}: {error}")
        raise
    finally:
        ranks.close_zygote()


def run(make: Callable[[], contextlib.AbstractContextManager[Any]], cases: Sequence[Any], jobs: int) -> Iterator[Any]:
    """Rows as they are done. RuntimeError when one of the processes fails.

    Args:
        make: Makes a runner, whose run(case) returns the case's row.
        cases: In the order in which they begin.
        jobs: Number of processes.
    """
    if not cases:
        return
    context = multiprocessing.get_context("spawn")
    todo, rows = context.Queue(), context.Queue()
    for case in cases:
        todo.put(case)
    workers = [context.Process(target=_work, args=(make, todo, rows)) for _ in range(jobs)]
    for worker in workers:
        todo.put(None)
        worker.start()
    try:
        for _ in cases:
            row = rows.get()
            if isinstance(row, str):
                raise RuntimeError(row)
            yield row
    finally:
        for worker in workers:
            worker.join(_END_S)
            if worker.is_alive():
                worker.terminate()  # as Ctrl-C: a lab removes itself
                worker.join()


def gates(rows: Sequence[Any]) -> list[report.Gate]:
    """No row may fail."""
    return [report.Gate("rows that fail", sum(row.verdict == "FAIL" for row in rows), "==", 0)]


def cause(said: str) -> str:
    """The line of a failed job's report that says most."""
    told = re.search(r"^\s*what\(\):.*$", said, re.MULTILINE) or re.search(
        r"^[\w.]*(Error|Exception)\b.*$", said, re.MULTILINE
    )
    return told[0].strip() if told else said.splitlines()[0]
