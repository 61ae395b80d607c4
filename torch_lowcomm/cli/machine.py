"""Versions and machine of a measurement; every number is printed and stored with them."""

import os
import platform
from pathlib import Path
from typing import Any

import torch

from torch_lowcomm._version import __version__


def versions() -> dict[str, str]:
    """Returns the versions of Python, torch and torch_lowcomm."""
    return {"python": platform.python_version(), "torch": str(torch.__version__), "torch_lowcomm": __version__}


def machine() -> dict[str, Any]:
    """Returns the processor, the number of cores that this process may use, memory (GiB) and system."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": cpu,
        "cores": cores,
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def heading(name: str, **options: object) -> str:
    """Returns the `#` lines above a measurement's rows: versions, machine and options."""
    about = {**versions(), **machine()}
    return "\n".join(
        (
            f"# {name}",
            "# " + "  ".join(f"{key}={value}" for key, value in about.items()),
            "# " + "  ".join(f"{key}={value}" for key, value in options.items()),
        )
    )
