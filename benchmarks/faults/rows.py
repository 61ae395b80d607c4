"""Rows of a matrix of faults: which are wanted, their runs in processes that share the work, and the program around them."""

from __future__ import annotations

import abc
import argparse
import contextlib
import dataclasses
import fnmatch
import json
import multiprocessing
import re
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ranks
import report
from linklab import Lab, LabError, LabUnavailable
from linklab.cli import EXIT_UNAVAILABLE
from linklab.tools import check, die_with_us

_END_S = 20  # for a process to end its labs
_KNOWN = ("verdict", "reasons", "seconds")  # of a row's JSON, with the fields of its case


@dataclasses.dataclass
class Row:
    """A case and what came of it: PASS, FAIL or n/a, why, and what was seen."""

    case: Any
    verdict: str
    reasons: list[str] = dataclasses.field(default_factory=list)
    seen: dict[str, Any] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """One flat object; errors and what each rank saw only where the row failed."""
        left_out = ("struck", "over", *(() if self.verdict == "FAIL" else ("facts", "said")))
        seen = {key: value for key, value in self.seen.items() if key not in left_out}
        case = dataclasses.asdict(self.case)
        return {**case, "verdict": self.verdict, "reasons": self.reasons, **seen, "seconds": self.seconds}

    @staticmethod
    def from_json(row: dict[str, Any], kind: type) -> Row:
        """Reads the value that `to_json` returned for a case of a kind."""
        names = [field.name for field in dataclasses.fields(kind)]
        seen = {key: value for key, value in row.items() if key not in (*names, *_KNOWN)}
        return Row(kind(*(row[name] for name in names)), row["verdict"], row["reasons"], seen, row["seconds"])

    def line(self) -> str:
        """The row as it is printed."""
        numbers = "".join(
            f"  {key.removesuffix('_s').replace('_', ' ')} {value:.3g}{' s' if key.endswith('_s') else ''}"
            for key, value in self.seen.items()
            if isinstance(value, int | float) and key not in ("struck", "over")
        )
        why = "  " + self.reasons[0].splitlines()[0][:300] if self.reasons else ""
        return f"{self.verdict:<4}  {self.case.name:<52}{self.seconds:6.1f} s{numbers}{why}"


class Runner(abc.ABC):
    """Runs rows one after another; keeps the labs it made. A context manager."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._labs: dict[Hashable, Lab] = {}

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def lab(self, key: Hashable, **options: Any) -> Lab:
        """The lab of a key, made with these options where there is none yet."""
        if key not in self._labs:
            self._labs[key] = self._stack.enter_context(Lab(**options))
        return self._labs[key]

    @abc.abstractmethod
    def play(self, case: Any) -> tuple[list[str], dict[str, Any]]:
        """Runs a case's ranks: the reasons why the row fails, and what was seen."""

    def run(self, case: Any) -> Row:
        """One row. LabUnavailable where it needs a lab and there can be none."""
        if why := case.impossible():
            return Row(case, "n/a", [why])
        start = time.monotonic()
        try:
            reasons, seen = self.play(case)
        except LabUnavailable:
            raise
        except (ranks.RanksFailed, LabError) as error:
            print(str(error)[-4000:], file=sys.stderr)  # where the ranks were: for who runs it, not for the JSON
            reasons, seen = [_cause(str(error))], {}
        return Row(case, "FAIL" if reasons else "PASS", reasons, seen, time.monotonic() - start)


def _cause(said: str) -> str:
    """The line of a failed job's report that says most."""
    told = re.search(r"^\s*what\(\):.*$", said, re.MULTILINE) or re.search(
        r"^[\w.]*(Error|Exception)\b.*$", said, re.MULTILINE
    )
    return told[0].strip() if told else said.splitlines()[0]


def chosen(patterns: Sequence[str], among: Sequence[Any], columns: str) -> list[Any]:
    """Cases that match one of the patterns, names with wildcards, in their order. ValueError when a pattern matches none; it
    shows the parts of a name, `columns`.
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


def run(make: Callable[[], Runner], cases: Sequence[Any], jobs: int) -> Iterator[Row]:
    """Rows as they are done by so many processes, begun in the order of the cases. RuntimeError when one of them fails."""
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


def parse(name: str, columns: str, quick: bool) -> argparse.Namespace:
    """Reads and checks the command line of the program of a name, whose rows are named by columns."""
    parser = argparse.ArgumentParser(prog=name, description="Groups with every fault; labs need root.")
    if quick:
        parser.add_argument("--quick", action="store_true", help="a row of each fault")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="ROW", help=f"rows by {columns} with wildcards")
    parser.add_argument("--jobs", type=int, default=1, help="rows at a time (1); they mostly wait")
    parser.add_argument("--json", type=Path, help="versions, machine, rows with their reasons, gates")
    parser.add_argument(
        "--resume", action="store_true", help="rows that the JSON file has and did not fail are not run again"
    )
    parser.add_argument("--list", action="store_true", help="the rows; runs nothing")
    args = parser.parse_args()
    if args.resume and not args.json:
        parser.error("--resume: expected --json with the file to go on with, got none")
    if args.jobs < 1:
        parser.error(f"--jobs: expected 1 or more, got {args.jobs}")
    return args


def main(
    name: str,
    columns: str,
    runner: Callable[[], Runner],
    table: Callable[[Sequence[Row]], str],
    *,
    matrix: Callable[[], Iterator[Any]],
    quick: Callable[[], Iterator[Any]] | None = None,
) -> int:
    """Runs the rows of a program's matrix, or with --quick the few of `quick`; 1 when one fails, 2 for wrong arguments, 77 where
    a lab is needed and none can be made. `columns` are the parts of a case's name; `table` makes a text of all rows.
    """
    args = parse(name, columns, quick is not None)
    every = list(quick() if quick and args.quick else matrix())
    try:
        cases = chosen(args.only, every, columns)
    except ValueError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    if args.list:
        for case in cases:
            print(f"{case.name}{'  n/a: ' if case.impossible() else ''}{case.impossible()}")
        return 0
    print(report.heading(name, rows=f"{len(cases)} of {len(every)}", jobs=args.jobs), flush=True)
    done: dict[Any, Row] = {}
    if args.resume and args.json.exists():
        earlier = (Row.from_json(row, type(every[0])) for row in json.loads(args.json.read_text())["rows"])
        done = {row.case: row for row in earlier if row.verdict != "FAIL"}
        cases = [case for case in cases if case not in done]
    start = time.monotonic()

    def found() -> list[Row]:
        return [done[case] for case in every if case in done]

    def content() -> dict[str, Any]:
        return {"seconds": time.monotonic() - start, "rows": [row.to_json() for row in found()]}

    def gates() -> list[report.Gate]:
        return [report.Gate("rows that fail", sum(row.verdict == "FAIL" for row in found()), "==", 0)]

    try:
        if any(case.needs_lab for case in cases):
            check()
        for some, jobs in (([c for c in cases if not c.alone], args.jobs), ([c for c in cases if c.alone], 1)):
            for row in run(runner, some, jobs):
                done[row.case] = row
                print(row.line(), file=sys.stderr, flush=True)
                if args.json and len(done) % 20 == 0:
                    report.write_json(args.json, content(), gates())
    except LabUnavailable as error:
        print(f"{name}: {error}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    except KeyboardInterrupt:
        print("# interrupted", file=sys.stderr)
    counts = {word: sum(row.verdict == word for row in found()) for word in ("PASS", "FAIL", "n/a")}
    print(table(found()))
    print(f"{counts['PASS']} rows hold, {counts['FAIL']} fail, {counts['n/a']} cannot exist.")
    return report.finish(gates(), args.json, content())
