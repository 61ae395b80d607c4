"""A job for a Python module on every host of a lab: starts the module, and is what the module reads and writes."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from linklab.errors import LabError
from linklab.lab import Lab

_DEADLINE_S = 3600
# The environment in which a program on a host finds the modules of this folder's parent and those of the examples.
_FOLDERS = (str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "examples"))
ON_HOSTS = {"PYTHONPATH": os.pathsep.join(filter(None, (*_FOLDERS, os.environ.get("PYTHONPATH"))))}


def run_on_hosts(lab: Lab, module: str, job: Mapping[str, Any], *, env: Mapping[str, str] | None = None) -> list[Any]:
    """Runs `python -m module JOB.json` on each host of a lab, where the module's `main` calls `job_of_host`; returns their
    results.

    `env` is added to the path of modules and to no policy. Where a rank fails it is a LabError with what it printed last.
    """
    with tempfile.TemporaryDirectory(prefix="lowcomm-job-") as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job))
        whole = {**ON_HOSTS, "LOWCOMM_POLICY": "", **(env or {})}
        ended = lab.run([sys.executable, "-m", module, str(path)], timeout_s=_DEADLINE_S, env=whole)
        # Those first that failed by themselves: the others were ended for it.
        failed = sorted((rank for rank in range(lab.hosts) if ended[rank].code), key=lambda rank: ended[rank].code < 0)
        if failed:
            said = "".join(f"\n---- rank {rank}: {ended[rank].code}\n{ended[rank].output[-3000:]}" for rank in failed)
            raise LabError(f"expected exit code 0 on every rank, ranks {failed} ended otherwise{said}")
        return [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(lab.hosts)]


def job_of_host() -> tuple[dict[str, Any], Callable[[Any], None]]:
    """Returns the job of this host's module, and a function that writes the module's result."""
    path = Path(sys.argv[1])

    def finish(result: Any) -> None:
        path.with_name(f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))

    return json.loads(path.read_text()), finish


def leave() -> None:
    """Ends this process without a teardown: plain gloo may abort as its process ends, after everything is done."""
    sys.stdout.flush()
    os._exit(0)
