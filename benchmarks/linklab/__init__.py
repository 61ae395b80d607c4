"""Slow links on one machine: 2 to 8 hosts out of network namespaces, shaped, delayed, lossy, cut and restored.

    with Lab(hosts=2, rate="100mbit") as lab:
        ended = lab.run([sys.executable, "train.py"], timeout_s=600)    # a rank a host, torchrun's environment
        lab.cut(1); lab.restore(1); lab.bytes(0)

Linux only, and as root. benchmarks/results/linklab.md has the commands and what is measured.
"""

from linklab.errors import LabError, LabUnavailable
from linklab.jobs import Job, RankExit
from linklab.lab import Lab, Traffic
from linklab.link import Link

__all__ = ["Job", "Lab", "LabError", "LabUnavailable", "Link", "RankExit", "Traffic"]
