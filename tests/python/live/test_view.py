"""The text of the page, of accounts that are made up; and what debug_handlers says where torch's server cannot be used."""

import sys

import pytest

import torch_lowcomm as lc
from torch_lowcomm.live.view import View


def _account(rank, ranks, ops, sent_bytes=0, notes=None, **link):
    """Of a rank whose link to rank 0, or of rank 0 to the last one, is as given."""
    well = {"connected": True, "cuts": 0, "sent_bytes": sent_bytes, "retransmitted": 0, "round_trip_s": 0.02}
    links = {str(peer): {**well, "path": "direct", "cipher": ""} for peer in range(ranks) if peer != rank}
    links["0" if rank else str(ranks - 1)].update(link)
    group = {"rank": rank, "size": ranks, "ops": ops, "idle_s": 4.0, "last": "all_reduce 41", "links": links}
    figures = {"raw_bytes": 8_000_000, "wire_bytes": 1_000_000, "inner_bytes": 0, "relative_error": 0.125}
    sent = {"all_reduce": {**figures, "encode_s": 0.5, "decode_s": 0.25, "wait_s": 9.0}}
    return {"host": f"host{rank}", "pid": 1, "ops": sent, "notes": notes or {}, "groups": {"0": group}}


def test_seven_ranks_wait_for_one_and_one_does_not_answer():
    waiting = [{"op": "all_reduce", "sequence": 42, "queued_s": -3.25, "wait": {"rank": 6}}]
    progress = {"DiLoCoX": {"outer_steps": 3, "waited_s": 0.25}}
    accounts = [_account(rank, 8, waiting, notes=progress) for rank in range(6)]
    accounts += [_account(6, 8, []), "TimeoutError"]
    lines = View().text(accounts).splitlines()
    assert lines[0].endswith(": 7 of 8 ranks answer")
    rows = {line.split()[0]: line.split() for line in lines[2:10]}
    assert rows["0"][1:] == ["host0", "all_reduce", "42", "3.2", "6", "1.0", "8.0", "8.0", "0.8", "9.0", "0.12"]
    assert rows["6"][1:7] == ["host6", "computing", "after", "all_reduce", "41", "4.0"]
    assert rows["7"][1:5] == ["-", "no", "answer", "-"]
    assert lines[10] == "rank 7 does not answer: TimeoutError"
    (wait,) = [line for line in lines if line.startswith("all_reduce 42:")]
    assert wait == "all_reduce 42: ranks 0-5 wait 3.2 s for rank 6, which is computing after all_reduce 41 (4.0 s)"
    assert "DiLoCoX: outer steps 3, waited s 0.25 (ranks 0-5)" in lines


def test_links_that_need_a_look_come_first_and_have_rates_from_the_second_look_on(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("torch_lowcomm.live.view.time.monotonic", lambda: now[0])
    view, bad = View(), {"connected": False, "cuts": 1}

    def links(sent_bytes, **options):
        accounts = [_account(rank, 8, [], sent_bytes, **(bad if rank in (0, 7) else {})) for rank in range(8)]
        lines = view.text(accounts, **options).splitlines()
        return lines[lines.index("LINKS") + 2 :]

    first = links(0)
    assert first[0].split() == ["0", "-", "7", "-", "-", "-", "0", "2", "not", "connected", "-"]
    assert len(first) == 11 and first[-1] == "18 more links (top --all)"
    now[0] += 2.0
    every = links(1_000_000, all_links=True)
    assert len(every) == 28 and every[1].split()[3:5] == ["4.0", "4.0"]


@pytest.mark.parametrize(
    ("missing", "says"),
    [("torch.distributed.debug", "torch 2.11 to 2.15 have it"), ("tabulate", "pip install jinja2 tabulate aiohttp")],
)
def test_what_the_server_lacks_is_named(monkeypatch, missing, says):
    for name in [
        name for name in sys.modules if name.startswith(("torch.distributed.debug.", "torch.distributed.flight"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=says):
        lc.debug_handlers()
