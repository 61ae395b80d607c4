"""The command: `python benchmarks pipelines …`."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import report
from linklab import LabError, LabUnavailable

from pipelines import cases, gates, thread_share
from pipelines.measure import Measured, measure


def parse() -> argparse.Namespace:
    """Reads and checks the command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks pipelines", description="Seconds a pipeline's step takes on slow links."
    )
    parser.add_argument("--quick", action="store_true", help="one link and the cases of its gates")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="of links, slow, thread: those whose names hold one")
    parser.add_argument("--repetitions", type=int, help="turns of every case (3 to 7, by link)")
    parser.add_argument("--compute", action="store_true", help="stages compute a block each, in place of sleeping")
    parser.add_argument("--json", type=Path, help="versions, machine, rows, gates")
    args = parser.parse_args()
    if args.repetitions is not None and args.repetitions < 1:
        parser.error(f"--repetitions: expected 1 or more, got {args.repetitions}")
    return args


def tcp() -> str:
    """How this machine's TCP finds a rate, which delayed links are left with."""
    file = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    return file.read_text().strip() if file.exists() else "unknown"


def show(measured: Measured, work: str) -> None:
    """A line a case; `work` is what stages do, sleep or compute."""
    times = ", ".join(f"{1e3 * s:.1f}" for s in (*measured.forward_s, *measured.backward_s))
    round_trip = f", a round trip takes {1e3 * measured.round_trip_s:.1f} ms" if measured.round_trip_s else ""
    print(
        f"# {measured.link}: activations of {'x'.join(map(str, measured.shape))}; both stages {work} {times} ms forward and "
        f"backward\n# a TCP stream has {measured.goodput_bits / 1e6:.1f} Mbit/s{round_trip}, "
        f"{measured.frames_lost} frames lost by the lab"
    )
    print(
        f"# {'messages':<30}{'schedule':<10}{'ms a step':>10}{'least':>8}{'most':>8}{'bound':>8}{'x bound':>9}"
        f"{'sent MB':>9}"
    )
    for row in measured.rows:
        ms = (1e3 * s for s in (row.seconds, row.least_s, row.most_s, row.bound_s))
        cells = "{:>10.1f}{:>8.1f}{:>8.1f}{:>8.1f}".format(*ms)
        print(f"  {row.name:<30}{row.order:<10}{cells}{row.ratio:>9.3f}{row.sent / 1e6:>9.3f}", flush=True)


def show_thread(rows: list[thread_share.Row]) -> None:
    """A line a way and stage."""
    print("# training thread, processor ms of a micro-batch; a block of 1024 channels, 128 tokens, on loopback")
    print(f"# {'messages':<30}{'stage':<10}{'compute':>10}{'messages':>10}{'share':>9}")
    for row in rows:
        print(
            f"  {row.name:<30}{row.stage:<10}{1e3 * row.compute_s:>10.2f}{1e3 * row.messages_s:>10.3f}{row.share:>9.4f}",
            flush=True,
        )


def main() -> int:
    """Runs every link, the slowest messages and the training thread, and reports."""
    args = parse()
    chosen = cases.quick() if args.quick else cases.settings()

    def wanted(name: str) -> bool:
        return not args.only or any(word in name for word in args.only)

    compute = "a block a stage" if args.compute else "none: stages sleep"
    options = {"micro_batches": cases.MICRO_BATCHES, "compute": compute, "delayed_tcp": tcp()}
    print(report.heading("pipelines", **options))
    held: list[report.Gate] = []
    content: dict[str, Any] = {**options, "links": [], "thread": []}

    def run(setting: cases.Setting) -> Measured:
        measured = measure(setting, repetitions=args.repetitions or setting.repetitions, compute=args.compute)
        show(measured, "compute" if args.compute else "sleep")
        rows = [dataclasses.asdict(row) | {"ratio": row.ratio} for row in measured.rows]
        content["links"].append(dataclasses.asdict(measured) | {"rows": rows})
        return measured

    try:
        for setting in chosen:
            if wanted(setting.link):
                held += gates.of_link(setting, run(setting))
        if not args.quick and not args.compute and wanted("slow"):
            held += gates.of_slow_messages(run(cases.slow_messages()))
        if wanted("thread"):
            rows = thread_share.measure(2 if args.quick else 5)
            show_thread(rows)
            held += gates.of_thread(rows)
            content["thread"] = [dataclasses.asdict(row) | {"share": row.share} for row in rows]
    except (LabError, LabUnavailable) as error:
        raise SystemExit(f"pipelines: {error}") from None
    return report.finish(held, args.json, content)
