"""docs/two-offices.md as it is written, on two hosts of the lab behind firewalls: doctor, plan, and an office that drops out."""

import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from linklab import Lab, tools
from links import ENV, expect_labs

PAGE = Path(__file__).resolve().parents[3] / "docs" / "two-offices.md"
PATH = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
FIREWALL = """table inet office {{
    chain input {{
        type filter hook input priority 0; policy drop;
        iif lo accept
        tcp dport {{ {} }} accept
        tcp flags & (syn | ack) != syn accept
    }}
}}"""
DEADLINE_S = 600


class Offices:
    """The two hosts, a folder each, and the page's commands with the first host's address."""

    def __init__(self, lab, folder):
        page = PAGE.read_text()
        self.lab, self.address = lab, lab.address(0)
        self.folders = [folder / name for name in "ab"]
        (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        self.secret, self.settings, self.doctor, self.plan, self.store, self.train = (
            block.strip().replace("a.example", self.address)
            for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
        )
        (self.status,) = re.findall(
            r"`(python -m torch_lowcomm status [^`]+)`", page.replace("a.example", self.address)
        )
        for office, path in enumerate(self.folders):
            path.mkdir()
            (path / "train.py").write_text(program)
            ports = "29400, 29500, 29600" if office == 0 else "29600"
            tools.nft(FIREWALL.format(ports), inside=lab.namespace(office))

    def start(self, office, command):
        """Starts a command in an office's shell."""
        settings = self.settings if (self.folders[office] / "secret").exists() else "true"
        words = ["bash", "-c", f"cd {self.folders[office]} && {settings} && exec {command}"]
        return self.lab.start_on(
            office, words, env=ENV | {"PATH": PATH, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": ""}
        )


def outer_steps(job):
    """The outer steps that an office has printed."""
    return [int(number) for number in re.findall(r"outer step (\d+)", job.output(0))]


def wait_for(what, holds, *jobs):
    """Waits for an event; the error has what the offices say."""
    end = time.monotonic() + DEADLINE_S
    while not holds():
        if time.monotonic() > end:
            pytest.fail(
                f"expected {what} within {DEADLINE_S} s\n" + "\n----\n".join(job.output(0)[-3000:] for job in jobs)
            )
        time.sleep(0.1)


@pytest.mark.later
def test_two_offices(tmp_path):
    expect_labs("nft")
    with Lab(hosts=2, rate="50mbit", delay="5ms") as lab:
        offices = Offices(lab, tmp_path)
        assert offices.start(0, offices.secret).wait(60)[0].code == 0
        shutil.copy(offices.folders[0] / "secret", offices.folders[1])

        tried = [offices.start(office, offices.doctor.replace("rank 0", f"rank {office}")) for office in (0, 1)]
        assert [job.wait(DEADLINE_S)[0].code for job in tried] == [0, 0], tried[0].output(0)
        said = tried[0].output(0)
        assert len(re.findall(r"^ +[01] +[01] +eth0 .* \d+\.\d$", said, re.MULTILINE)) == 2, said
        assert "LOWCOMM_" not in said, said  # the ports are open, and nothing has to be set

        (planned,) = offices.start(0, offices.plan).wait(DEADLINE_S)
        assert planned.code == 0 and "Streaming DiLoCo, 2 bits" in planned.output, planned.output

        offices.start(0, offices.store)
        a = offices.start(0, offices.train)
        b = offices.start(1, offices.train.removesuffix("a") + "b")
        wait_for("outer steps of both", lambda: all(max(outer_steps(job), default=0) >= 3 for job in (a, b)), a, b)
        (asked,) = offices.start(0, offices.status).wait(DEADLINE_S)
        assert set(re.findall(r"(?m)^([ab]) +alive ", asked.output)) == {"a", "b"}, asked.output
        os.killpg(b.pids[0], signal.SIGKILL)
        reached = outer_steps(a)[-1]
        wait_for("outer steps of one office alone", lambda: outer_steps(a)[-1] >= reached + 3, a, b)
        b = offices.start(1, offices.train.removesuffix("a") + "b")
        ended = [job.wait(DEADLINE_S)[0] for job in (a, b)]
        assert [one.code for one in ended] == [0, 0], ended
        assert re.search(r"going on without b|forming another group", a.output(0)), a.output(0)
        assert outer_steps(b)[0] >= reached, b.output(0)
        assert [outer_steps(job)[-1] for job in (a, b)] == [150, 150]
        losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", a.output(0))]
        assert sum(losses[-5:]) < 0.9 * sum(losses[:5]), losses
        assert all("times fewer" in job.output(0) for job in (a, b)), b.output(0)
