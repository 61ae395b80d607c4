"""An example's own `main` in a rank that has torch already: all of torchrun's work but the rendezvous."""

import functools
import importlib
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest
import ranks
import torch.distributed as dist

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
DEADLINE_S = 150


def run_main(r, name, directory, arguments):
    """`torchrun examples/<name>.py --batch 2 <arguments> --json run.json` in a directory, this rank of it."""
    sys.path.insert(0, str(EXAMPLES))
    os.chdir(directory)
    os.environ["RANK"] = str(r.rank)
    sys.argv = [str(EXAMPLES / f"{name}.py"), "--batch", "2", *arguments, "--json", "run.json"]
    store = f"file://{r.folder}/store"
    dist.init_process_group = functools.partial(
        dist.init_process_group, init_method=store, rank=r.rank, world_size=r.size
    )
    importlib.import_module(name).main()


def run_example(name, directory, *arguments, size=2, timeout=180):
    """Runs an example in fresh ranks; returns what each wrote and the runs of its JSON."""
    outputs = []
    ranks.run_ranks(run_main, size, name, str(directory), arguments, timeout=timeout, outputs=outputs)
    return outputs, json.loads((directory / "run.json").read_text())


def refusal(name, arguments, monkeypatch, capsys):
    """Returns the text with which the example ends before it starts anything: one sentence, after its own name."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--batch", "2", *arguments])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main()
    said = ended.value.code  # a string: Python prints it on stderr and exits with 1
    assert said.startswith(f"{name}.py: ")
    assert "\n" not in said
    assert capsys.readouterr() == ("", "")
    return said


class Machines:
    """An example's processes, which end with the test."""

    def __init__(self, folder, name):
        self.folder, self.all = folder, []
        self.file = str(EXAMPLES / f"{name}.py")

    def start(self, *arguments, launch=()):
        log = self.folder / f"out{len(self.all)}"
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *launch, self.file, *arguments]
        with log.open("w") as out:
            process = subprocess.Popen(command, cwd=self.folder, stdout=out, stderr=out, env=environment)
        process.log = log
        self.all.append(process)
        return process

    def until(self, said, process, after=0):
        """Waits until a process has written this, behind the first `after` characters; returns all that it has written."""
        deadline = time.monotonic() + DEADLINE_S
        while said not in (text := process.log.read_text())[after:]:
            assert time.monotonic() < deadline, f"no {said!r} in: {text}"
            assert process.poll() is None or said in process.log.read_text()[after:], process.log.read_text()
            time.sleep(0.05)
        return text

    def end(self):
        for process in self.all:
            if process.poll() is None:
                process.kill()
            process.wait()
