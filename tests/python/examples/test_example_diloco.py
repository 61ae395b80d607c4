"""examples/train_diloco.py: two clusters by torchrun, and machines that are killed and come back at a store."""

import json
import os
import pathlib
import signal
import time

import pytest
from example_main import EXAMPLES, Machines, run_example

DEADLINE_S = 150
ENDLESS = ["--batch", "2", "--sync-every", "4", "--steps", "100000", "--timeout", "20"]


@pytest.mark.slow
def test_example_trains(tmp_path):
    """Next to the exact run: hundreds of times fewer bytes, and the loss falls. The plot is drawn."""
    outputs, (exact, outer) = run_example("train_diloco", tmp_path, "--steps", "24", "--sync-every", "4")
    assert exact["sent_bytes"][-1] > 4 * 6 * outer["sent_bytes"][-1] > 0
    assert outer["loss"][-1] < outer["loss"][0] - 0.5
    assert outer["machines"] == [2] * 6
    assert "fewer bytes, times" in outputs[0]
    assert (tmp_path / "runs" / "train_diloco.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def machines(tmp_path):
    started = Machines(tmp_path, "train_diloco")
    yield started
    started.end()


@pytest.mark.slow
def test_example_goes_on_without_a_machine_and_takes_it_back(machines, tmp_path, port):
    common = ["--store", f"127.0.0.1:{port}", *ENDLESS]
    first = machines.start(*common, "--machine", "a", "--min-machines", "1")
    second = machines.start(*common, "--machine", "b", "--min-machines", "2")
    machines.until("2 of 2", first)
    second.send_signal(signal.SIGKILL)
    machines.until("1 of 1", first)
    again = machines.start(*common, "--machine", "b", "--min-machines", "1")
    machines.until("2 of 2", again)
    time.sleep(2)
    for process in (first, again):
        process.send_signal(signal.SIGTERM)
    for process in (first, again):
        assert process.wait(timeout=DEADLINE_S) == 0, process.log.read_text()
    survivor, back = (json.loads((tmp_path / "runs" / f"diloco-{name}.json").read_text()) for name in "ab")
    assert survivor["losses"] >= 1
    assert {1, 2} <= set(survivor["machines"])
    assert back["first_step"] > 0  # it took the others' count of steps, and with it their model
    for one in (survivor, back):
        assert one["sent_bytes"] == sorted(one["sent_bytes"]), "the bytes of groups that have ended count"
        assert len(one["machines"]) <= len(one["loss"]) // 4 + 1, "an outer step counts once"
    start = sum(survivor["loss"][:4]) / 4
    assert sum(back["loss"][:4]) / 4 < start - 0.5
    assert back["perplexity"] == pytest.approx(survivor["perplexity"], rel=0.1)


def _of_readme(port):
    """The sites as README.md starts them, at a store with a port of its own: the arguments of every site."""
    lines = (EXAMPLES.parent / "README.md").read_text().splitlines()
    assert "    python -m torch_lowcomm store --listen 127.0.0.1:29400 &" in lines
    found = []
    for command in [line.strip(" &").split() for line in lines if "examples/train_diloco.py --s" in line]:
        launch = ["torchrun", "--nproc-per-node", "2", "--max-restarts", "3", "--master-port"]
        assert command[:6] == launch and command[7:9] == ["examples/train_diloco.py", "--store"], command
        found.append([argument.replace("29400", str(port)) for argument in command[8:]])
    return found


LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]


@pytest.mark.slow
def test_torchrun_starts_a_site_again_whose_rank_is_killed(machines, tmp_path, port):
    """README's `--max-restarts`: the other site goes on alone meanwhile, and the site takes its model and count of steps."""
    first, second = _of_readme(port)
    endless = [*ENDLESS, "--min-machines", "1"]
    stays = machines.start(*first, *endless, launch=LAUNCH)
    returns = machines.start(*second, *endless, launch=LAUNCH)
    told = len(machines.until("2 of 2", stays))
    workers = _children(returns.pid)
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    told = machines.until("1 of 1", stays, told).index("1 of 1", told)
    machines.until("2 of 2", stays, told)
    time.sleep(2)
    for process in (stays, returns):
        for pid in _children(process.pid):
            os.kill(pid, signal.SIGTERM)
    for process in (stays, returns):
        assert process.wait(timeout=DEADLINE_S) == 0, process.log.read_text()
    survivor, back = (json.loads((tmp_path / "runs" / f"diloco-{name}.json").read_text()) for name in "ab")
    assert survivor["losses"] >= 1 and back["first_step"] > 0
    assert back["perplexity"] == pytest.approx(survivor["perplexity"], rel=0.1)


def _children(pid):
    """Numbers of a process's children, in the order of their start."""
    return sorted(int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
