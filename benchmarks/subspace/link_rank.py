"""One stage of the timing, run on every host: `python -m subspace.link_rank JOB.json`; writes what it measured next to it."""

from __future__ import annotations

import statistics
import time
from datetime import timedelta
from typing import Any

import model
import torch
import torch.distributed as dist
from convergence.subspace.rounded import Whole
from linklab.job import job_of_host
from pipelines.cases import MICRO_BATCHES
from pipelines.compute import alone
from pipelines.rank import ALONE, WARM_UP, Timed, schedule_of

import torch_lowcomm as lc
from subspace.link_cases import Case
from subspace.waiting import decoder

TIMEOUT = timedelta(seconds=300)


class Way(Timed):
    """One case: its stage and schedule, and what its steps and its micro-batches by themselves took."""

    def __init__(self, case: Case, job: dict[str, Any]) -> None:
        super().__init__(dist.group.WORLD)
        rank, count = dist.get_rank(), dist.get_world_size()
        self.samples, self.time_ = job["shape"]
        whole = decoder(job["width"], count, job["token_s"], context=job["context"])
        boundary = None
        if case.kind == "constrained":
            whole = lc.subspace.constrain(whole, case.rank)
        else:
            boundary = Whole(job["width"])
        self.module = lc.subspace.cut(whole, rank, count, coefficients=case.coefficients, boundary=boundary)
        self.stage = lc.pipeline.Stage(self.module, rank, count, torch.device("cpu"))
        self.schedule = schedule_of(self.stage, case)
        self.ids = tokens(MICRO_BATCHES * self.samples, self.time_)
        self.alone: list[tuple[float, float]] = []

    def step(self) -> None:
        """One step of the schedule, without an optimizer's."""
        lc.pipeline.step(self.schedule, self.ids, target=self.ids, ids=self.ids)
        self.module.zero_grad()

    def by_itself(self) -> None:
        """Times some micro-batches of the stage without messages."""
        ids = self.ids[: self.samples]
        for _ in range(ALONE):
            x = ids
            if not self.module.is_first:
                x = torch.randn(*ids.shape, self.module.rank).to(self.module.coefficient_dtype)
            self.alone.append(alone(self.module, x, last=self.module.is_last, ids=ids))

    def result(self) -> dict[str, Any]:
        """As Timed, with seconds of a micro-batch by itself."""
        forward_s, backward_s = map(statistics.median, zip(*self.alone, strict=True))
        return {**super().result(), "forward_s": forward_s, "backward_s": backward_s}

    def generated(self, prompts: int, length: int, new: int) -> tuple[float, float]:
        """Seconds until prompts of a length have their first token, and seconds a token of as many prompts of one."""
        return self.generate(tokens(prompts, length), 1), self.generate(tokens(prompts, 1), new) / new

    def generate(self, prompts: torch.Tensor, new: int) -> float:
        """Seconds, on all ranks from the same time on."""
        dist.barrier()
        start = time.perf_counter()
        lc.subspace.generate(self.module, prompts, max_new_tokens=new)
        return time.perf_counter() - start


def tokens(samples: int, time_: int) -> torch.Tensor:
    """The same on every rank, [samples, time]."""
    return torch.randint(model.VOCABULARY, (samples, time_), generator=torch.Generator().manual_seed(1))


def main() -> None:
    """Times every case, step by step in turn, and then what they generate."""
    job, finish = job_of_host()
    torch.set_num_threads(1)
    dist.init_process_group("lowcomm", timeout=TIMEOUT)
    cases = [Case(**case) for case in job["cases"]]
    ways = [Way(case, job) for case in cases]
    for way in ways:
        for _ in range(WARM_UP):
            way.step()
    for _ in range(job["repetitions"]):
        for way in ways:
            dist.barrier()
            way.by_itself()
            dist.barrier()
            way.time()
    generated = {}
    for way, case in zip(ways, cases, strict=True):
        if job["generate"] and case.generates:
            way.generate(tokens(1, 1), 2)  # makes the connections of tokens
            generated[case.name] = [way.generated(*job["generate"]) for _ in range(case.generates)]
    finish({"rows": [way.result() for way in ways], "generated": generated})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
