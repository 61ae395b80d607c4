"""LOWCOMM_METRICS=FILE.prom: the account of a process as a file for the textfile collector of Prometheus' node exporter."""

import atexit
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_lowcomm._log import logger
from torch_lowcomm.live.account import account

_EVERY_S = 10.0
_GAUGES = ("ratio", "relative_error", "straggler", "connected", "round_trip_s")
_begun = False


def begin(environment: Mapping[str, str], rank: int) -> None:
    """Begins to write the file every ten seconds and at exit, if LOWCOMM_METRICS names one and none is written yet. Each rank
    writes its own, FILE.rank<rank>.prom. A ValueError if the name does not end in .prom, or the file cannot be written.
    """
    global _begun
    name = environment.get("LOWCOMM_METRICS")
    if not name or _begun:
        return
    if not name.endswith(".prom"):
        raise ValueError(f"LOWCOMM_METRICS: expected FILE.prom, the names that node_exporter reads, got {name!r}")
    file, over = Path(name).with_suffix(f".rank{rank}.prom"), threading.Event()
    try:
        _write(file, rank)
    except OSError as error:
        remedy = "make its folder and let this user write there, or name another file"
        raise ValueError(f"LOWCOMM_METRICS: cannot write {file}: {error.strerror}: {remedy}") from error
    _begun = True

    def write_until_over() -> None:
        is_over = False
        while not is_over:
            is_over = over.wait(_EVERY_S)
            try:
                _write(file, rank)
            except OSError as error:
                logger.warning("LOWCOMM_METRICS: cannot write %s: %s", file, error.strerror)

    thread = threading.Thread(target=write_until_over, name="lowcomm-metrics", daemon=True)
    thread.start()
    atexit.register(thread.join)
    atexit.register(over.set)


def _write(file: Path, rank: int) -> None:
    made = file.with_suffix(".new")
    made.write_text(text(account(), rank))
    made.replace(file)


def text(of: Mapping[str, Any], rank: int) -> str:
    """Returns the numbers of an account in Prometheus' text format, with the rank in labels."""
    families: dict[str, list[str]] = {}

    def add(kind: str, figures: Mapping[str, Any], **labels: str) -> None:
        for field, value in figures.items():
            if isinstance(value, (int, float)):
                is_gauge = kind in ("group", "progress") or field in _GAUGES
                name = f"lowcomm_{kind}_{field}" + ("" if is_gauge else "_total")
                lines = families.setdefault(name, [f"# TYPE {name} {'gauge' if is_gauge else 'counter'}"])
                told = (f",{label}={json.dumps(what, ensure_ascii=False)}" for label, what in labels.items())
                lines.append(f'{name}{{rank="{rank}"{"".join(told)}}} {float(value)!r}')

    for op, figures in of["ops"].items():
        add("op", figures, op=op)
    for name, group in of["groups"].items():
        ages = [-op["queued_s"] for op in group["ops"]]
        add("group", {"ops_under_way": len(ages), "oldest_op_s": max(ages, default=0)}, group=name)
        for peer, link in group["links"].items():
            add("link", link, group=name, peer=peer)
    for what, figures in of["notes"].items():
        add("progress", figures, method=what)
    return "".join(f"{line}\n" for lines in families.values() for line in lines)
