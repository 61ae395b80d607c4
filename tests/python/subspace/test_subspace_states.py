"""A checkpoint of some stages that goes on at another number of stages: weights and moments."""

import copy

import pytest
import subspace_case as case
import test_subspace_pipeline as pipelines
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from diloco_model import differing
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.pipelining import Schedule1F1B

import torch_lowcomm as lc

TWO, FOUR = [3, 1], [1, 1, 1, 1]
SAVED, END = 10, 20
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # by the decoder's names, which no two stages share


class _Run:
    """This rank's stage of a decoder, and all that a checkpoint has of it."""

    def __init__(self, group, sizes, seed=0):
        index, count = dist.get_rank(group), len(sizes)
        model = lc.subspace.constrain(case.gpt(seed=seed), case.RANK, sigma=1.0)
        self.module = lc.subspace.cut(model, index, count, blocks=sizes)
        stage = lc.pipeline.Stage(self.module, index, count, torch.device("cpu"), group=group)
        self.group, self.schedule = group, Schedule1F1B(stage, pipelines.MICRO, loss_fn=case.loss)
        self.optimizer = lc.SubspaceAdamW(self.module, lr=1e-2)

    def train(self, steps):
        pipelines.train(steps, self.schedule, self.optimizer, self.group)

    def state(self):
        optimizer = get_optimizer_state_dict(self.module, self.optimizer, options=FLAT)
        for name in optimizer:
            if name.endswith(".param_names"):  # of the cut, not of the decoder
                assert optimizer[name] == [name for name, _ in self.module.named_parameters()]
                optimizer[name] = []
        return {"model": self.module.state_dict(), "optimizer": optimizer}

    def load(self, state):
        self.module.load_state_dict(state["model"])
        set_optimizer_state_dict(self.module, self.optimizer, state["optimizer"], options=FLAT)


def _merged(states):
    """The state that one process puts together of all stages' states."""
    return {part: lc.subspace.merge_states(state[part] for state in states) for part in ("model", "optimizer")}


def _gathered(run):
    states = [None] * dist.get_world_size(run.group)
    dist.all_gather_object(states, run.state(), group=run.group)
    return _merged(states)


@pytest.mark.later
@pytest.mark.on("quad", group={}, timeout=180)
def test_a_checkpoint_goes_on_at_another_number_of_stages(r):
    pair, everybody, alone = (dist.new_group(members) for members in ([0, 1], range(4), [3]))
    folder, merged = r.path("dcp"), None
    if r.rank < 2:
        first = _Run(pair, TWO)
        first.train(range(SAVED))
        dcp.save(first.state(), checkpoint_id=folder, process_group=pair)
        merged = copy.deepcopy(_gathered(first))
        first.train(range(SAVED, END))
    told = [merged]
    dist.broadcast_object_list(told, 0)
    merged = told[0]

    # Two stages become four, by either way with the same bits.
    runs = {}
    for how in ("merge", "dcp"):
        run = runs[how] = _Run(everybody, FOUR, seed=1)
        state = merged
        if how == "dcp":
            state = run.state()
            dcp.load(state, checkpoint_id=folder, process_group=everybody)
        run.load(state)
        assert not differing(_gathered(run), merged)
    again = copy.deepcopy(_gathered(run))
    for run in runs.values():
        run.train(range(SAVED, END))
    four = _gathered(runs["merge"])
    assert not differing(_gathered(runs["dcp"]), four)
    for name, value in four["model"].items():
        of_basis_or_anchor = name.endswith(("_extra_state", "subspace_basis.vectors"))
        assert torch.equal(value, merged["model"][name]) == of_basis_or_anchor, name

    # Four become two again, which go on as if nothing had been; the boundaries of four round in other places than those of two.
    if r.rank < 2:
        second = _Run(pair, TWO, seed=2)
        second.load(again)
        second.train(range(SAVED, END))
        two = _gathered(second)
        assert not differing(two, _gathered(first))
        for part in ("model", "optimizer"):
            for name, value in two[part].items():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    assert case.apart(four[part][name], value) < 1e-9, name

    # And one.
    run.train(range(END, END + 3))
    later = _gathered(run)
    if r.rank == 3:
        whole = _Run(alone, [4], seed=3)
        whole.load(four)
        assert not differing(_gathered(whole), four)
        whole.train(range(END, END + 3))
        for name, value in whole.module.named_parameters():
            assert case.apart(value, later["model"][name]) < 1e-9, name
