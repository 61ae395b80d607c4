"""A link that is cut under an outer loop (lab): survivors go on, the machine behind the cut ends with an error that says so."""

import os
import sys
import time

import pytest
from linklab import Lab
from links import ENV, ROOT, expect_labs

EXAMPLE = str(ROOT / "examples" / "train_diloco.py")
DEADLINE_S = 120


def _until(said, job):
    end = time.monotonic() + DEADLINE_S
    while said not in job.output(0):
        assert time.monotonic() < end and job.running(), f"no {said!r} in: {job.output(0)}"
        time.sleep(0.1)


def _outputs_after_a_cut(tmp_path, train, launch=(), name="--machine"):
    """Cuts the third of three machines, or sites, off: (its output, those of the others, which end well)."""
    expect_labs()
    environment = ENV | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment["LOWCOMM_FLIGHT_DIR"] = str(tmp_path)
    with Lab(hosts=3, rate="100mbit") as lab:

        def start(host, least):
            command = [sys.executable, *launch, EXAMPLE, "--store", "10.77.0.1:29400", *train, name, f"m{host}"]
            command += ["--min-machines", str(least), "--json", str(tmp_path / f"m{host}.json")]
            return lab.start_on(host, command, env=environment)

        store = lab.start_on(0, [sys.executable, EXAMPLE, "--serve", "29400"], env=environment)
        _until("store at port", store)
        jobs = [start(0, 2), start(1, 2), start(2, 3)]
        for job in jobs:  # the third one says it when it has the outer state
            _until("3 of 3", job)
        lab.cut(2)
        _until("2 of 2", jobs[0])
        (lost,) = jobs[2].wait(DEADLINE_S)
        assert lost.code != 0
        others = [job.wait(DEADLINE_S)[0] for job in jobs[:2]]
        for ended in others:
            assert ended.code == 0, ended.output
    assert os.path.exists(tmp_path / "m0.json")
    return lost.output, [ended.output for ended in others]


@pytest.mark.slow
def test_a_cut_link_is_a_named_error_and_the_others_go_on(tmp_path):
    train = ["--batch", "2", "--sync-every", "4", "--timeout", "8", "--steps", "500"]
    lost, others = _outputs_after_a_cut(tmp_path, train)
    assert "ConnectionError: membership: lost the store: expected an answer within 8 s" in lost, lost
    for output in others:
        assert "outer_step failed" in output, output


@pytest.mark.slow
def test_a_cut_link_takes_a_whole_site_away(tmp_path):
    """Sites of two ranks each, which shard the model: those that are left go on, that behind the cut ends, both ranks of it."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1", "--master-port=29500"]
    train = ["--batch", "1", "--sync-every", "4", "--timeout", "10", "--steps", "120"]
    lost, others = _outputs_after_a_cut(tmp_path, train, launch, "--site")
    assert "membership: lost the store: expected an answer within 10 s" in lost, lost
    for output in others:
        assert "outer_step failed" in output or "DiLoCoX outer step" in output, output
