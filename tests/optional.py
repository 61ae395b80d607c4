"""What tests use beyond Python, a compiler and CMake. Without one of these its tests are skipped, and the summary says so.

python3 tests/optional.py debian    the Debian packages that are missing here, for apt-get
python3 tests/optional.py pip       the Python packages that recipes need, for pip; not those that are LARGE
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

# Debian package by what it brings: a command, or a folder.
DEBIAN = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nft": "nftables",
    "valgrind": "valgrind",
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "qemu-aarch64": "qemu-user",
    "/usr/share/datasets/fashion-mnist": "dataset-fashion-mnist",
}
# pip's name by the module's.
PIP = {
    "transformers": "transformers",
    "accelerate": "accelerate",
    "pytorch_lightning": "pytorch-lightning",
    "lightning": "pytorch-lightning",
    "torchft": "torchft-nightly",
    "deepspeed": "deepspeed",
    "yaml": "PyYAML",
    "ray": "ray[train]",
    "tabulate": "tabulate",
    "requests": "requests",
    "prometheus_client": "prometheus-client",
}
# With what it needs, ray is 150 MB to load and 500 MB on disk.
LARGE = {"ray"}


def is_there(what: str) -> bool:
    """Whether a command is on PATH, or among an administrator's; or a folder exists."""
    if what.startswith("/"):
        return Path(what).exists()
    return bool(shutil.which(what) or shutil.which(what, path="/usr/sbin:/sbin"))


if __name__ == "__main__":
    if sys.argv[1:] == ["debian"]:
        print(*sorted({package for what, package in DEBIAN.items() if not is_there(what)}))
    elif sys.argv[1:] == ["pip"]:
        print(*sorted({package for module, package in PIP.items() if module not in LARGE}))
    else:
        sys.exit(__doc__)
