"""The command: `python benchmarks pipelines …`."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import report
from tables import Columns

from pipelines import cases, gates
from pipelines.measure import Measured, measure

COLUMNS = Columns(
    "messages 30 | schedule 10 | ms a step 11.1f | least 8.1f | most 8.1f | bound 8.1f | x bound 9.3f | sent MB 9.3f"
)


def parse() -> argparse.Namespace:
    """Reads and checks the command line."""
    parser = report.arguments(
        "Seconds a pipeline's step takes on slow links; as root.", quick="one link and the cases of its gates"
    )
    parser.add_argument("--only", nargs="+", metavar="WORD", help="of links and slow: those whose names hold one")
    parser.add_argument("--repetitions", type=report.positive, help="turns of every case (3 to 7, by link)")
    parser.add_argument("--compute", action="store_true", help="stages compute a block each, in place of sleeping")
    return parser.parse_args()


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
        f"{measured.frames_lost} frames lost by the lab\n{COLUMNS.heading()}"
    )
    for row in measured.rows:
        ms = (1e3 * s for s in (row.seconds, row.least_s, row.most_s, row.bound_s))
        print(COLUMNS.row(row.name, row.order, *ms, row.ratio, row.sent / 1e6), flush=True)


def main() -> int:
    """Runs every link and the slowest messages, and reports."""
    args = parse()
    compute = "a block a stage" if args.compute else "none: stages sleep"
    options = {"micro_batches": cases.MICRO_BATCHES, "compute": compute, "delayed_tcp": tcp()}
    print(report.heading("pipelines", **options))
    held: list[report.Gate] = []
    content: dict[str, Any] = {**options, "links": []}

    def wanted(name: str) -> bool:
        return not args.only or any(word in name for word in args.only)

    def run(setting: cases.Setting) -> Measured:
        measured = measure(setting, repetitions=args.repetitions or setting.repetitions, compute=args.compute)
        show(measured, "compute" if args.compute else "sleep")
        rows = [dataclasses.asdict(row) | {"ratio": row.ratio} for row in measured.rows]
        content["links"].append(dataclasses.asdict(measured) | {"rows": rows})
        return measured

    for setting in cases.quick() if args.quick else cases.settings():
        if wanted(setting.link):
            held += gates.of_link(setting, run(setting))
    if not args.quick and not args.compute and wanted("slow"):
        held += gates.of_slow_messages(run(cases.slow_messages()))
    return report.finish(held, args.json, content)
