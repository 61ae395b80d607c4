"""`lowcomm store` and `lowcomm status`: the machines at a store, as another process sees them."""

import pytest
import torch.distributed as dist
from listening import listening

import torch_lowcomm as lc
from torch_lowcomm import cli


@pytest.fixture
def address():
    """Of a store that the command keeps."""
    with listening("store") as at:
        yield at


def _rows(capsys, *arguments):
    assert cli.main(["status", *arguments]) == 0
    return {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}


def test_machines_that_are_there_and_that_have_left(address, capsys):
    host, port = address.split(":")

    def client():
        return dist.PrefixStore("run", dist.TCPStore(host, int(port), is_master=False))

    assert cli.main(["status", address]) == 1
    assert "has no machines under the prefix ''" in capsys.readouterr().err
    members = lc.Membership(client(), "office-a", lost_after_s=1.0)
    formed = members.form()
    for _ in range(3):
        members.count_step()
    members.tell(2)
    found = _rows(capsys, address, "--prefix", "run")
    assert found["machine"][:2] == ["machine", "state"]
    assert [found["office-a"][i] for i in (1, 4, 5, 6)] == ["alive", "3", "2", str(formed.number)]
    other = lc.Membership(client(), "office-b", lost_after_s=1.0)
    members.leave()
    while "left" not in _rows(capsys, address, "--prefix", "run")["office-a"]:
        pass
    assert _rows(capsys, address, "--prefix", "run")["office-b"][-1] == "-"  # in no group
    assert cli.main(["store", "--listen", address]) == 1
    assert "Address already in use" in capsys.readouterr().err
    other.leave()


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        ("status nowhere", 2, "status: expected HOST:PORT, got 'nowhere'"),
        ("status 127.0.0.1:1", 1, "status: expected a store at 127.0.0.1:1, got [Errno 111] Connection refused"),
        ("store --listen 29400", 2, "store: expected HOST:PORT, got '29400'"),
        ("top localhost", 2, "top: expected HOST:PORT, got 'localhost'"),
        (
            "top 127.0.0.1:1",
            1,
            "lowcomm_text: [Errno 111] Connection refused: each rank calls start_debug_server(handlers=",
        ),
    ],
)
def test_mistakes_are_one_line(capsys, words, status, says):
    assert cli.main(words.split()) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("torch_lowcomm ") and says in line
