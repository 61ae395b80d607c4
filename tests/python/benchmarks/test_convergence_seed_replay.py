"""`python benchmarks convergence seed_replay` with four machines."""

import pytest
from example_main import quick_convergence


@pytest.mark.slow
def test_convergence_quick(tmp_path):
    content = quick_convergence("seed_replay", 8, tmp_path)
    sent = {curve["name"]: curve["bytes"][-1] for curve in content["curves"]}
    assert 10 * sent["byte"] < sent["DDP"] < sent["send_full_grad"]


@pytest.mark.slow
def test_adapters_quick(tmp_path):
    content = quick_convergence("seed_replay_lora", 4, tmp_path)
    assert {curve["name"] for curve in content["curves"]} == {"LoRA, byte", "LoRA, DDP"}
