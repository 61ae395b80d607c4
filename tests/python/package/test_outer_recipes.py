"""The outer loops of docs/recipes.md: torchruns of real sites, which end with the same bits after fewer bytes."""

import re

import pytest
import recipes
import torch

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
