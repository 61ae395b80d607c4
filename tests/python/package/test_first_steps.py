"""What a newcomer and a maintainer follow: docs/quickstart.md as it is written, the entry points, the workflows' commands."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import ranks
import torch.distributed as dist

from torch_lowcomm._compatibility import NEWEST, OLDEST

try:
    import tomllib
except ImportError:  # Python 3.10
    tomllib = None

ROOT = Path(__file__).resolve().parents[3]


def test_the_quickstart_is_as_it_is_written(tmp_path):
    page = (ROOT / "docs" / "quickstart.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    command = next(line.split() for line in page.splitlines() if line.startswith("torchrun --standalone"))
    launcher = [sys.executable, "-m", "torch.distributed.run", *command[1:]]
    status, out, err = ranks.run_command(launcher, deadline_s=120, cwd=tmp_path)
    assert status == 0, f"{out}\n{err}"
    shown = re.search(r"```text\n(.*?)```", page, re.DOTALL)[1]
    sent = r"this rank sent ([\d.]+) MB in place of ([\d.]+) MB, ([\d.]+) times fewer"
    here, on_page = (list(map(float, re.search(sent, text).groups())) for text in (out, shown))
    assert here == pytest.approx(on_page, rel=0.03), out
    assert float(re.search(r"loss ([\d.]+)", out)[1]) < 1.5, out


@pytest.mark.skipif(tomllib is None, reason="Python 3.10 has no tomllib")
def test_every_entry_point_registers_the_backend():
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert set(groups) == {"torch.backends", "torch.distributed.backends"}
    for group in groups.values():
        module, _, name = group["lowcomm"].partition(":")
        getattr(importlib.import_module(module), name)()
    assert "lowcomm" in dist.Backend.backend_list


def test_workflows_call_what_there_is():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    texts = {path.name: path.read_text() for path in (ROOT / ".github" / "workflows").iterdir()}
    called = {target for text in texts.values() for target in re.findall(r"run: make ([a-z-]+)", text)}
    assert called == {"lint", "test", "wheel", "docs"} and called <= targets
    matrix = re.search(r"torch: \[(.*)\]", texts["wheels.yml"])[1]
    assert re.findall(r"2\.(\d+)\.", matrix) == [str(minor) for minor in range(OLDEST[1], NEWEST[1] + 1)]
    assert re.findall(r"torch: \"2\.(\d+)\.", texts["ci.yml"])[::2] == [str(OLDEST[1]), str(NEWEST[1])]
