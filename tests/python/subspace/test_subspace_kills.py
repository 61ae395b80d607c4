"""A stage of a constrained decoder that is killed: in a step, and in each phase of a switch of the subspace."""

import contextlib
import os
import signal

import pytest
import subspace_case as case
import test_subspace_pipeline as pipelines
import torch
import torch.distributed as dist
from diloco_model import differing
from torch.distributed.pipelining import Schedule1F1B

import torch_lowcomm as lc
from torch_lowcomm.subspace import grassmann

EVERY, VICTIM = 2, 1


def _die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def _step(schedule, x, y):
    lc.pipeline.step(schedule, x, target=y, ids=x)


@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "backward"])
@pytest.mark.on(4, timeout=120, allow_exit={1: -signal.SIGKILL})
def test_a_stage_that_is_killed_in_a_step_is_named(r, gradients):
    r.init("lowcomm", timeout_s=300)  # longer than the test's: nobody waits for a time-out
    schedule, (stage,) = pipelines.pipeline(r, "1F1B", 4, torch.float32)
    x, y = pipelines._batch()
    _step(schedule, x, y)
    before = [p.detach().clone() for p in stage.submod.parameters()]
    if r.rank == VICTIM:
        block = stage.submod.get_submodule(f"blocks.{VICTIM}")
        if gradients:
            block.register_full_backward_hook(_die)
        else:
            block.register_forward_pre_hook(_die)
    with pytest.raises((dist.DistBackendError, RuntimeError)) as failure:
        _step(schedule, x, y)
        _step(schedule, x, y)  # a rank whose part is over hears of it in its next step
    assert all(torch.equal(a, b) for a, b in zip(before, stage.submod.parameters(), strict=True))
    text = str(failure.value)  # of those further off with the cause of the stage that heard first
    assert text.startswith(f"stage {r.rank}: ") and f"rank {VICTIM} (global {VICTIM})" in text, text
    assert "boundary" in text, text


PHASES = {"confirm, half said": {0, 1}, "commit": {1}}  # in which it is killed, and the versions that it may leave


class _Run:
    """A rank's stage of three with its optimizer and its part of the subspace's steps."""

    def __init__(self, r, index):
        model = lc.subspace.constrain(case.gpt(layers=3), case.RANK)
        self.r, self.index = r, index
        self.module = lc.subspace.cut(model, index, 3)
        self.optimizer = lc.SubspaceAdamW(self.module, lr=1e-2)

    def join(self, group):
        """Takes part in a new group of all three."""
        _begin(self.r, group, 3, self.index)
        stage = lc.pipeline.Stage(self.module, self.index, 3, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, pipelines.MICRO, loss_fn=case.loss)
        self.subspace = lc.subspace.Grassmann([stage], self.optimizer, every=EVERY)
        return self

    def train(self, steps):
        pipelines.train(steps, self.schedule, self.optimizer, self.subspace)

    def parts(self):
        return {"module": self.module, "optimizer": self.optimizer, "subspace": self.subspace}

    def save(self, name):
        state = {key: part.state_dict() for key, part in self.parts().items()}
        torch.save(state, self.r.path(f"{name}{self.index}"))

    def saved(self, name):
        return torch.load(self.r.path(f"{name}{self.index}"))

    def load(self, name):
        for key, part in self.parts().items():
            part.load_state_dict(self.saved(name)[key])


def _begin(r, group, size, rank):
    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.FileStore(str(r.path(f"group {group}")), size)
    dist.init_process_group("lowcomm", store=store, rank=rank, world_size=size)


def _spoil(subspace, phase):
    """This rank dies in a phase of its next switch."""
    if phase == "confirm, half said":

        def say(number, group):  # as all_gather_json does
            mine = torch.frombuffer(bytearray(str(number).encode()), dtype=torch.uint8)
            lengths = torch.empty(3, dtype=torch.int64)
            dist.all_gather_into_tensor(lengths, torch.tensor([len(mine)]), group=group)
            texts = torch.zeros(3, int(lengths.max()), dtype=torch.uint8)
            padded = torch.nn.functional.pad(mine, (0, texts.shape[1] - len(mine)))
            work = dist.all_gather_into_tensor(texts.view(-1), padded, group=group, async_op=True)
            while not texts[::2].any():  # it has heard of one at least
                pass
            _die(work)

        grassmann.all_gather_json = say
    else:
        subspace._commit = _die


@pytest.mark.later
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.on(4, timeout=180, allow_exit={VICTIM: -signal.SIGKILL})
def test_a_stage_that_is_killed_in_a_switch(r, phase):
    """All survivors have one version; with a checkpoint and a new rank in the victim's place all go on to the bit."""
    if r.rank == 3:
        r.hear("survived")
        run = _Run(r, VICTIM).join("whole")
    else:
        run = _Run(r, r.rank).join("of reference")
        run.train(range(EVERY + 1))
        run.save("end")
        run = _Run(r, r.rank).join("of the fault")
        run.train(range(EVERY - 1))
        run.save("before")
        if r.rank == VICTIM:
            _spoil(run.subspace, phase)
        with contextlib.suppress(dist.DistBackendError):
            run.train(range(EVERY - 1, EVERY))
            assert 1 in PHASES[phase], "a rank has changed that should not"
        left = sorted({0, 1, 2} - {VICTIM})
        _begin(r, "survivors", 2, left.index(r.rank))
        version = run.subspace.resume()
        found = [None, None]
        dist.all_gather_object(found, (version, run.subspace.version, run.module.subspace_basis.checksum))
        assert found[0] == found[1] and version in PHASES[phase], found
        assert max(run.optimizer.distances().values(), default=0) < 1e-12  # the last stage's block is free
        r.say("survived")
        run.join("whole")
    run.load("before")
    assert run.subspace.resume() == 0
    run.train(range(EVERY - 1, EVERY + 1))
    assert run.subspace.version == 1
    for key, part in run.parts().items():
        assert not differing(part.state_dict(), run.saved("end")[key]), key
    dist.destroy_process_group()
