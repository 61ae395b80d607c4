"""Runs the programs of docs/recipes.md as the page has them, under launchers of their own, and checks what they leave."""

import importlib.util
import pathlib
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import ranks
import torch

ROOT = pathlib.Path(__file__).parents[2]
DEADLINE_S = 180.0
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}


def needs(*packages):
    """Skips the test where one of these is not installed, with the command that installs them."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}: pip install {' '.join(missing).replace('_', '-')}")


def program(title):
    """The Python block of a section of the page."""
    section = (ROOT / "docs/recipes.md").read_text().split(f"### {title}\n")[1].split("\n##")[0]
    (block,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return block


def launch(tmp_path, title, launchers, *, start="train.py", restarts=0):
    """Runs a section's program under several launchers at once.

    Args:
        tmp_path: Where the program is written.
        title: The section's.
        launchers: [(ranks, environment, folder to run in)]; the ranks' output is in its folder log.
        start: The file that torchrun starts, in the same folder, if it is another one than the program.
        restarts: How often torchrun starts a program again that has failed.

    Returns:
        How each ended.
    """
    (tmp_path / "train.py").write_text(program(title))

    def run(job):
        size, env, folder = job
        launcher = ranks.torchrun(size, "--standalone", f"--max-restarts={restarts}", "--log-dir=log", "--redirects=3")
        return ranks.run_command([*launcher, tmp_path / start], deadline_s=DEADLINE_S, cwd=folder, env=QUIET | env)

    with ThreadPoolExecutor(len(launchers)) as pool:
        return list(pool.map(run, launchers))


def output(folder, name="stdout"):
    """All that the ranks of the launcher in this folder have written."""
    return "\n".join(log.read_text() for log in sorted(pathlib.Path(folder).glob(f"log/**/{name}.log")))


def expect_equal(one, other):
    """Two state dicts of the same bits."""
    assert one.keys() == other.keys() and one
    for name, tensor in one.items():
        assert tensor.isfinite().all() and torch.equal(tensor, other[name]), name


def untrained(state):
    """Whether a state dict has the weights that every program begins with."""
    torch.manual_seed(0)
    weight = torch.nn.Linear(64, 256).weight
    return any(torch.equal(tensor, weight) for tensor in state.values())
