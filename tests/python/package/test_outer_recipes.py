"""The outer loops of docs/recipes.md: torchruns of real sites, which end with the same bits after fewer bytes."""

import os
import re
import signal

import pytest
import recipes
import torch
import torch.distributed as dist
from torch import nn

import torch_lowcomm as lc

_ELEMENTS = 64 * 256 + 256 + 256 * 8 + 8


def _expect_trained(ended, folder, ranks_a_site):
    """Both sites said that their loss fell, and that a rank sent its part of an eighth of float32 at most."""
    said = recipes.output(folder)
    assert all(launcher.code == 0 for launcher in ended), "\n".join(
        [*(launcher.text for launcher in ended), said, recipes.output(folder, "stderr")]
    )
    sites = re.findall(r"site (\w+): loss ([\d.]+) to ([\d.]+), (\d+) bytes", said)
    assert len({name for name, *_ in sites}) == 2, said
    for _, first, last, sent in sites:
        assert float(last) < 0.7 * float(first), said
        assert 0 < int(sent) < _ELEMENTS * 4 / 8 / ranks_a_site, said
    return said


def _expect_one_model(states):
    """The sites have one model, which is not the one that they began with."""
    recipes.expect_equal(*states)
    assert not recipes.untrained(states[0])


def _two_sites(tmp_path, store, title, *, ranks_a_site):
    """Two launchers of one program, which meet at a store; returns what they said."""
    address = f"127.0.0.1:{store.port}"
    sites = [(ranks_a_site, {"STORE": address, "SITE": site}, tmp_path) for site in "ab"]
    return _expect_trained(recipes.launch(tmp_path, title, sites), tmp_path, ranks_a_site)


@pytest.mark.slow
def test_fsdp2_loop(tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    ended = recipes.launch(tmp_path, "A loop like torchtitan's, with FSDP2", [(4, {}, tmp_path)])
    _expect_trained(ended, tmp_path, 2)
    for site in range(2):
        dcp_to_torch_save(tmp_path / f"site{site}", tmp_path / f"site{site}.pt")
    _expect_one_model([torch.load(tmp_path / f"site{site}.pt")["model"] for site in range(2)])


@pytest.mark.slow
def test_accelerate(tmp_path, store):
    recipes.needs("accelerate")
    _two_sites(tmp_path, store, "Accelerate", ranks_a_site=2)
    _expect_one_model([torch.load(tmp_path / f"{site}.pt") for site in "ab"])


@pytest.mark.slow
@pytest.mark.parametrize("ranks_a_site", [1, 2])
def test_trainer(tmp_path, store, ranks_a_site):
    recipes.needs("transformers", "accelerate")
    _two_sites(tmp_path, store, "Hugging Face Trainer", ranks_a_site=ranks_a_site)
    from safetensors.torch import load_file

    _expect_one_model([load_file(tmp_path / site / "model.safetensors") for site in "ab"])


@pytest.mark.slow
def test_lightning(tmp_path, store):
    recipes.needs("pytorch_lightning")
    said = _two_sites(tmp_path, store, "Lightning", ranks_a_site=2)
    _expect_one_model([torch.load(tmp_path / f"{site}.ckpt", weights_only=True)["state_dict"] for site in "ab"])
    validated = re.findall(r"validated (.*)", said)
    assert len(validated) == 2 and validated[0] == validated[1], "sites validate the same parameters"


class _Machine:
    """A machine of one process, whose framework calls step() and catches nothing."""

    def __init__(self, r, port, **options):
        names = {}
        exec(recipes.program("Frameworks that own the process group"), names)
        torch.manual_seed(0)
        self.model = nn.Linear(64, 8)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        self.members = lc.Membership(store, f"site{r.rank}", min_machines=2, lost_after_s=2.0)
        inner = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        arguments = {"sync_every": 5, "mode": "sync", "model": self.model, "group": self.members} | options
        self.opt = names["OuterLoop"](inner, **arguments)
        self.draws = torch.Generator().manual_seed(r.rank)

    def steps_until(self, reached):
        while not reached():
            x = torch.randn(16, 64, generator=self.draws)
            nn.functional.mse_loss(self.model(x), x[:, :8].sin()).backward()
            self.opt.step()
            self.opt.zero_grad()


@pytest.mark.on(3, alike=True, timeout=90, allow_exit={2: -signal.SIGKILL})
def test_an_optimizer_that_goes_on_by_itself(r, port):
    machine = _Machine(r, port)
    machine.steps_until(lambda: len(machine.members.formed.machines) == 3)
    last = machine.opt.steps + 10
    machine.steps_until(lambda: machine.opt.steps >= last)
    if r.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    machine.steps_until(lambda: len(machine.members.formed.machines) == 2)
    last = machine.opt.steps + 10
    machine.steps_until(lambda: machine.opt.steps >= last)
    machine.opt.finish()
    machine.members.leave()
    return [parameter.detach().clone() for parameter in machine.model.parameters()]


@pytest.mark.on(2, timeout=90)
def test_an_optimizer_that_goes_on_by_itself_counts_samples(r, port):
    """Machine 0 moves by -1 with three samples, machine 1 by 1 with one: an inner step each, by the limit of an interval."""
    options = {"sync_every": 1, "sync_seconds": 1000.0, "codec": None, "outer_lr": 1.0, "outer_momentum": 0.0}
    machine = _Machine(r, port, **options)
    weight = machine.model.weight
    before = weight.detach().clone()
    machine.opt.param_groups[0]["lr"] = 1.0
    for parameter in machine.model.parameters():
        parameter.grad = torch.full_like(parameter, 1.0 - 2.0 * r.rank)  # AdamW's first step is its sign
    machine.opt.param_groups[0]["weight_decay"] = 0.0
    machine.opt.step(samples=3 - 2 * r.rank)
    machine.opt.finish()
    machine.members.leave()
    assert (weight.detach() - before).mean().item() == pytest.approx((3 * -1 + 1) / 4, abs=1e-5)
