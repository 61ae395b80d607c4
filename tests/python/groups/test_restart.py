"""Workers that torchrun starts again meet one another, and not the dead ones, in whose store they are."""

import os
import re
import threading
import time
import types
from datetime import timedelta

import pytest
import ranks
import torch.distributed as dist

import torch_lowcomm as lc
from torch_lowcomm import _create
from torch_lowcomm._create import create_backend

WORKER = """
import os, signal
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("lowcomm")
rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
for group in (None, dist.new_group([0, 1]), mesh.get_group("b")):
    x = torch.ones(4)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [2] * 4
if attempt < 2:
    dist.barrier()
    if rank == attempt:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        dist.all_reduce(x)
dist.barrier()
print(f"rank {rank} is well", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", [["--standalone"], ["--master-port", "port"]], ids=["standalone", "static"])
def test_workers_that_are_started_again_meet(tmp_path, rendezvous):
    """Each rank is killed once."""
    (tmp_path / "worker.py").write_text(WORKER)
    rendezvous = [str(ranks.free_port()) if word == "port" else word for word in rendezvous]
    launch = ranks.torchrun(2, *rendezvous, "--max-restarts", "2")
    environment = {"OMP_NUM_THREADS": "1", "LOWCOMM_FLIGHT_DIR": str(tmp_path)}
    status, out, err = ranks.run_command([*launch, "worker.py"], deadline_s=120, cwd=tmp_path, env=environment)
    assert status == 0, f"{out}\n{err}"
    assert sorted(re.findall("rank . is well", out)) == ["rank 0 is well", "rank 1 is well"]


def _prefixes(store, numbers, size, timeout=timedelta(seconds=20)):
    """Each of these ranks asks on a thread of its own: by rank the prefix, or the text of its error."""
    from torch_lowcomm._fresh_store import fresh_store

    found = {}

    def ask(rank):
        client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        try:
            prefix = fresh_store(client, rank, size, timeout)
            prefix.set(f"from{rank}", "")
            found[rank] = prefix
        except dist.DistBackendError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_every_attempt_has_a_prefix_of_its_own(store, monkeypatch):
    monkeypatch.setitem(os.environ, "TORCHELASTIC_RUN_ID", "a")
    before = None
    for attempt in range(10):
        found = _prefixes(store, range(4), 4)
        for prefix in found.values():
            # A store's set() does not wait for its answer, so another client's question may overtake it.
            prefix.wait([f"from{rank}" for rank in range(4)], timedelta(seconds=20))
            prefix.set("attempt", str(attempt))
        assert before is None or before.get("attempt") == str(attempt - 1).encode()
        before = found[0]


@pytest.mark.later
def test_a_rank_that_does_not_come_is_told(store, monkeypatch):
    """The dead ones' words do not count as its coming."""
    monkeypatch.setitem(os.environ, "TORCHELASTIC_RUN_ID", "a")
    _prefixes(store, range(3), 3)
    found = _prefixes(store, [0, 2], 3, timedelta(seconds=5))
    said = "lowcomm: expected all 3 ranks at the store within 5 s, got ranks [0, 2]"
    assert found == {0: said, 2: said}


def test_a_store_that_no_server_keeps_is_as_it_was(monkeypatch):
    from torch_lowcomm._fresh_store import fresh_store

    monkeypatch.delitem(os.environ, "TORCHELASTIC_RUN_ID", raising=False)
    store = dist.HashStore()
    assert fresh_store(store, 0, 2, timedelta(seconds=1)) is store


@pytest.mark.on(2, env={"TORCHELASTIC_RUN_ID": None, "TORCHELASTIC_USE_AGENT_STORE": None})
def test_a_store_that_ends_as_a_group_is_made_is_told(r):
    """As srun, mpirun and mp.spawn start ranks: rank 1 makes its next group while rank 0 serves the store of the first one."""
    if r.rank == 0:
        r.say("port", ranks.free_port())
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": r.hear("port"), "RANK": str(r.rank), "WORLD_SIZE": "2"}
    stores, original = [], _create.fresh_store
    _create.fresh_store = lambda store, *args: stores.append(store) or original(store, *args)
    dist.init_process_group("lowcomm", timeout=timedelta(seconds=60))
    dist.barrier()
    if r.rank == 0:
        (store,) = stores
        first = store.get("seen/1")
        r.say("go")
        while store.get("seen/1") == first:  # rank 1 is in the store again
            time.sleep(0.01)
        del store
    r.hear("go")
    stores.clear()
    dist.destroy_process_group()
    if r.rank == 1:
        said = "expected the store to serve.*give every group a MASTER_PORT of its own"
        with pytest.raises(dist.DistBackendError, match=f"(?s){said}"):
            dist.init_process_group("lowcomm", timeout=timedelta(seconds=60))


def test_the_deadline_is_that_of_the_options(store, monkeypatch):
    """Where the options name one, the group's own argument (30 minutes by default) does not count."""
    monkeypatch.setitem(os.environ, "TORCHELASTIC_RUN_ID", "a")
    group = types.SimpleNamespace(
        store=dist.PrefixStore("options", dist.TCPStore("127.0.0.1", store.port, is_master=False)),
        group_rank=0,
        group_size=2,
        timeout=timedelta(minutes=30),
        group_id="options",
        global_ranks_in_group=[0, 1],
    )
    with pytest.raises(dist.DistBackendError, match=r"all 2 ranks at the store within 2 s, got ranks \[0\]"):
        create_backend(group, lc.Options("", timeout=timedelta(seconds=2)))
