"""One stage of the timing, run on every host: `python -m pipelines.rank JOB.json`; writes what it measured next to it."""

from __future__ import annotations

import abc
import dataclasses
import os
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import model
import torch
import torch.distributed as dist
from linklab.job import job_of_host
from linklab.rank import interface_received
from torch.distributed import pipelining

import torch_lowcomm as lc
from pipelines.cases import FOUR_BITS, MICRO_BATCHES, PAPER, Case
from pipelines.compute import Block, Sleep, alone, loss, move

TIMEOUT = timedelta(seconds=120)
WARM_UP = 2  # steps in which torch infers shapes and connections find their rate
ALONE = 5  # micro-batches that a stage computes by itself, in its turn
VISITS = 4  # batches of samples that come in turn; a cache sees all of them before anything is timed


def groups() -> dict[str, dist.ProcessGroup]:
    """Made on all ranks in this order."""
    return {
        "gloo": dist.new_group(backend="gloo", timeout=TIMEOUT),
        "lowcomm": dist.new_group(backend="lowcomm", timeout=TIMEOUT, pg_options=lc.Options(policy="")),
        "lowcomm p2p": dist.new_group(
            backend="lowcomm", timeout=TIMEOUT, pg_options=lc.Options(policy=f"p2p={FOUR_BITS}", min_bytes=0)
        ),
    }


def sent_in_messages(group: dist.ProcessGroup) -> int:
    """Bytes that lowcomm has sent in a group's messages, frames included; 0 in a group of gloo."""
    if dist.get_backend(group) == "gloo":
        return 0
    ops = lc.stats(group)[group.group_name].items()
    return sum(figures["wire_bytes"] or 0 for op, figures in ops if op.split()[0] == "send")


def schedule_of(stage: Any, case: Any) -> Any:
    """The schedule of a case, one of cases.py's or another that has its attributes."""
    kinds = {"GPipe": pipelining.ScheduleGPipe, "1F1B": pipelining.Schedule1F1B}
    kind, ahead = kinds[case.schedule], {}
    if case.ahead:
        kind, ahead = lc.pipeline.Schedule1F1B, {"ahead": case.ahead}
    return kind(stage, MICRO_BATCHES, loss_fn=loss, **ahead)


class Timed(abc.ABC):
    """Steps of a schedule, what they took, and what one of them sent."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.seconds: list[float] = []
        self.sent, self.interface = 0, 0

    @abc.abstractmethod
    def step(self) -> None:
        """One step of the schedule."""

    def time(self) -> None:
        """One step, from the end of another one: the last stage has begun when the first one does, as in a training.

        What a stage sends last is still on its way when its step ends; what it receives has come. So interfaces count that.
        """
        sent, interface, start = sent_in_messages(self.group), interface_received(), time.perf_counter()
        self.step()
        self.seconds.append(time.perf_counter() - start)
        self.interface = interface_received() - interface
        self.sent = sent_in_messages(self.group) - sent

    def result(self) -> dict[str, Any]:
        """As JSON. `message_bytes`: of one message, as its link carries it before TCP's headers."""
        return {
            "seconds": self.seconds,
            "message_bytes": self.sent / MICRO_BATCHES,
            "interface_bytes": self.interface,
        }


class Way(Timed):
    """One case: its stage, schedule and cache, and what its steps took."""

    def __init__(self, case: Case, made: dict[str, dist.ProcessGroup], job: dict[str, Any], folder: Path) -> None:
        super().__init__(made[case.group])
        self.case = case
        rank, self.shape = dist.get_rank(), job["shape"]
        device, width = torch.device("cpu"), self.shape[2]
        self.module = Sleep(width, job["forward_s"], job["backward_s"])
        if job["compute"]:
            self.module = Block(model.Config(width=width, heads=width // 64, context=self.shape[1]))
        self.files = folder / "slots" if case.cache == "file" else None
        self.cache = cache = lc.pipeline.Cache(folder=self.files) if case.cache else None
        if case.ours:
            codecs = {"forward": case.forward or None, "backward": case.backward or None, "first_visit": case.first}
            unit = "message" if case.name in PAPER else None  # what a scale a channel needs to be taken
            stage = lc.pipeline.Stage(self.module, rank, 2, device, group=self.group, cache=cache, unit=unit, **codecs)
        else:
            stage = pipelining.PipelineStage(self.module, rank, 2, device, group=self.group)
        self.schedule = schedule_of(stage, case)
        self.generator = torch.Generator().manual_seed(0)
        batch = MICRO_BATCHES * self.shape[0]
        self.x = torch.randn(batch, *self.shape[1:], generator=torch.Generator().manual_seed(1))
        self.visit = 0

    def step(self) -> None:
        """One step of the schedule."""
        batch = len(self.x)
        if self.case.cache:
            samples, following = (
                range(visit % VISITS * batch, (visit % VISITS + 1) * batch) for visit in (self.visit, self.visit + 1)
            )
            self.cache.read_ahead(following)
            lc.pipeline.step(self.schedule, self.x, samples=samples, target=self.x)
        elif self.case.ours:
            lc.pipeline.step(self.schedule, self.x, target=self.x)
        else:
            first = dist.get_rank() == 0
            self.schedule.step(*([self.x] if first else []), **({} if first else {"target": self.x}))
        self.visit += 1
        move(self.module, self.generator)

    def drop_pages(self) -> None:
        """Slots in files leave the system's cache of pages: what the step reads ahead comes from the disk."""
        if self.cache is None or self.files is None:
            return
        self.cache.flush()
        for path in self.files.glob("*.slots"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def time(self) -> None:
        """As Timed."""
        self.drop_pages()
        super().time()

    def result(self) -> dict[str, Any]:
        """As Timed; gloo's messages are the activations alone."""
        whole = self.shape[0] * self.shape[1] * self.shape[2] * 4
        result = super().result()
        return result | {"message_bytes": result["message_bytes"] or whole}


def main() -> None:
    """Times every case, step by step in turn."""
    job, finish = job_of_host()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank = dist.get_rank()
    with tempfile.TemporaryDirectory(prefix="lowcomm-cache-") as folder:
        cases = [Case(**case) for case in job["cases"]]
        made = groups()
        ways = [Way(case, made, job, Path(folder)) for case in cases]
        stage, x, times = ways[0].module, torch.randn(*job["shape"]), []
        for way in ways:
            for _ in range(VISITS if way.case.cache else WARM_UP):
                way.step()
        for _ in range(job["repetitions"]):
            times += [alone(stage, x, last=rank == 1) for _ in range(ALONE)]
            for before, way in zip([ways[-1], *ways], ways, strict=False):
                if way.group is not before.group:
                    way.step()  # a connection that was silent for seconds measures its round trip anew (BBR)
                way.time()
        forward_s, backward_s = map(statistics.median, zip(*times, strict=True))
        finish(
            {
                "forward_s": forward_s,
                "backward_s": backward_s,
                "cases": [dataclasses.asdict(case) for case in cases],
                "rows": [way.result() for way in ways],
            }
        )
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
