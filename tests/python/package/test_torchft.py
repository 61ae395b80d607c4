"""lowcomm under torchft: its Manager over a killed replica group, and the process group that it makes again and again."""

import importlib.util
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import ranks
import recipes
import torch
import torch.distributed as dist

if importlib.util.find_spec("torchft") is None:
    pytest.skip("needs torchft: pip install torchft-nightly", allow_module_level=True)

DEADLINE_S = 120
POLICY = "all_reduce=qsgd4:bucket=64"


# All replica groups begin together. The third is killed as it says that it made an outer step with the others for the third
# time: the others are then in the interval that follows. Where torchrun starts it again, it waits until the others have made ten
# outer steps without it; they wait there until it asks to be let in.
_START = """
import builtins, os, pathlib, runpy, signal, time
import torch_lowcomm, torchft.local_sgd

here, replica, together, without = pathlib.Path(__file__).parent, os.environ["REPLICA"], [], []
started = os.environ["TORCHELASTIC_RESTART_COUNT"]
(here / f"ready{replica}").touch()

def wait_for(pattern, number):
    while len(list(here.glob(pattern))) < number:
        time.sleep(0.01)

def ask(manager, *args, ask=torchft.Manager.start_quorum, **options):
    if started == "1":
        (here / "again").touch()
    return ask(manager, *args, **options)

wait_for("ready?", 3)
wait_for("went_on?", 2 if started == "1" else 0)

def heard(*words, say=print, **options):
    say(*words, **options)
    together.extend(word for word in words if "of 3 replica groups" in word)
    without.extend(word for word in words if "of 2 replica groups" in word and together)
    if replica == "2" and started == "0" and len(together) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if replica != "2" and len(without) == 10:
        (here / f"went_on{replica}").touch()
        wait_for("again", 1)
    if (here / "again").exists() and any("of 2 replica groups" in word for word in words):
        time.sleep(0.5)  # it has asked, and the lighthouse has not heard of it yet

builtins.print, torchft.Manager.start_quorum = heard, ask
runpy.run_path(str(here / "train.py"), run_name="__main__")
"""


@pytest.fixture
def lighthouse():
    """Address of a lighthouse, in a process of its own as the page has it, from when it answers."""
    program = pathlib.Path(sys.executable).parent / "torchft_lighthouse"
    deadline = time.monotonic() + DEADLINE_S
    process = None
    while process is None or process.poll() is not None:  # it has ended if another process took the port
        assert time.monotonic() < deadline
        port = ranks.free_port()
        command = [program, f"--bind=[::]:{port}", "--min_replicas=2", "--join_timeout_ms=10000"]
        process = subprocess.Popen([*command, "--heartbeat_timeout_ms=2000"], stderr=subprocess.DEVNULL)
        while process.poll() is None and not _listens(process.pid, port):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


def _listens(pid, port):
    """Whether this process, and no other, has the listening socket of the port."""
    process = pathlib.Path(f"/proc/{pid}")
    try:
        listening = [line.split() for line in (process / "net/tcp6").read_text().splitlines()[1:]]
        files = [os.readlink(fd) for fd in (process / "fd").iterdir()]
    except OSError:  # it has just ended
        return False
    return any(f"socket:[{row[9]}]" in files for row in listening if row[1].endswith(f":{port:04X}") and row[3] == "0A")


def _trains(tmp_path, lighthouse):
    """Three replica groups run the page's program. Returns how each launcher ended, what each has written, their folders."""
    folders = [tmp_path / f"replica{replica}" for replica in range(3)]
    for folder in folders:
        folder.mkdir()
    (tmp_path / "start.py").write_text(_START)
    launchers = [
        (1, {"TORCHFT_LIGHTHOUSE": lighthouse, "REPLICA": str(replica)}, folders[replica]) for replica in range(3)
    ]
    ended = recipes.launch(tmp_path, "torchft", launchers, start="start.py", restarts=1)
    return ended, [recipes.output(folder) for folder in folders], folders


def _expect_trained(launcher, text, folder):
    assert launcher.code == 0, recipes.output(folder, "stderr")
    (numbers,) = re.findall(r"loss ([\d.]+) to ([\d.]+), ([\d.]+) times fewer bytes", text)
    first, last, fewer = map(float, numbers)
    assert last < 0.5 * first and fewer > 5, text


@pytest.mark.slow
def test_a_killed_replica_group_comes_back(tmp_path, lighthouse):
    """It takes the parameters from another group, and ends with the bits of the others."""
    ended, said, folders = _trains(tmp_path, lighthouse)
    for launcher, text, folder in zip(ended, said, folders, strict=True):
        _expect_trained(launcher, text, folder)
        assert "outer step 40 of 3 replica groups" in text, text
    for text in said[:2]:
        assert re.search("3+2{10,}3+$", "".join(re.findall(r"of (\d) replica groups", text))), text
    states = [torch.load(folder / "outer.pt") for folder in folders]
    recipes.expect_equal(states[0], states[1])
    recipes.expect_equal(states[0], states[2])


def _reduces(group, rank):
    """The mean error of an average over the group, of values that every rank can compute."""
    tensors = [torch.randn(100_000, generator=torch.Generator().manual_seed(r)) for r in range(group.size())]
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.SUM
    work = group.allreduce([tensors[rank]], options)
    work.wait()
    others = [torch.randn(100_000, generator=torch.Generator().manual_seed(r)) for r in range(group.size())]
    return (tensors[rank] - sum(others)).abs().mean().item()


def _made_again(r, port, fault):
    """A group of three; the third rank is killed or cut off; the others see it, and go on in a group of two."""
    from torchft.process_group import reconfigure_with_store

    import torch_lowcomm as lc
    from torch_lowcomm.torchft import ProcessGroupLowcomm

    group = ProcessGroupLowcomm(lc.Options(POLICY, min_bytes=0), timeout=timedelta(seconds=20))
    if r.rank == 0:  # it has made groups before the others came
        reconfigure_with_store(group, f"127.0.0.1:{port}/alone", 0, 1)
    reconfigure_with_store(group, f"127.0.0.1:{port}/first", r.rank, 3)
    assert 0 < _reduces(group, r.rank) < 0.5 and group.errored() is None
    (counts,) = [ops["all_reduce"] for ops in lc.stats().values()]
    assert counts["exact_calls"] == 0 and counts["ratio"] > 5, counts
    if r.rank == 2:
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        group.abort()
        return True
    with pytest.raises(dist.DistBackendError):
        for _ in range(3):  # the first may have come to its end before
            _reduces(group, r.rank)
    deadline = time.monotonic() + DEADLINE_S / 4
    while group.errored() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert isinstance(group.errored(), dist.DistBackendError), group.errored()
    reconfigure_with_store(group, f"127.0.0.1:{port}/second", r.rank, 2)
    assert group.errored() is None and group.size() == 2
    assert 0 < _reduces(group, r.rank) < 0.5 and group.errored() is None
    group.shutdown()
    return True


@pytest.mark.parametrize("fault", ["killed", "aborted"])
def test_a_group_is_made_again_without_a_lost_rank(store, fault):
    gone = {2: -signal.SIGKILL} if fault == "killed" else {}
    assert all(ranks.run_ranks(_made_again, 3, store.port, fault, timeout=DEADLINE_S, allow_exit=gone)[:2])


def test_options_of_another_type_are_refused():
    from torch_lowcomm.torchft import ProcessGroupLowcomm

    with pytest.raises(TypeError, match=r"options: expected torch_lowcomm\.Options or None, got str"):
        ProcessGroupLowcomm(POLICY)
