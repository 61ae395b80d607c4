"""PyTorch's own DistributedTest suite on lowcomm: nothing fails that gloo passes, and every exception has a reason.

`distributed_suite.py` runs it; `distributed_suite_gloo.txt` holds what plain gloo does, `distributed_suite_skips.txt` the
exceptions. Every test runs under lowcomm's own name, and as gloo where the suite skips it, or parts of it, under that name.
"""

import pathlib
import sys

import pytest
import ranks
import torch

HERE = pathlib.Path(__file__).parents[1]
LISTED_FOR = "2.13"


def _verdicts(text):
    """{test: pass, fail or skip} of the driver's lines."""
    split = [line.split(maxsplit=2) for line in text.splitlines() if line.startswith(("pass ", "fail ", "skip "))]
    return {words[1].rstrip(":"): words[0] for words in split}


def _exceptions(run):
    """{test: fail or skip} that the checked-in list allows in a run; each with its reason."""
    allowed = {}
    for line in (HERE / "distributed_suite_skips.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            named, _, reason = line.partition(": ")
            verdict, which, test = named.split()
            assert reason, f"no reason in: {line}"
            if which == run:
                allowed[test] = verdict
    return allowed


@pytest.mark.slow
@pytest.mark.parametrize(("run", "least"), [("as_gloo", 25), ("lowcomm", 60)])
def test_distributed_suite(run, least, tmp_path):
    gloo = _verdicts((HERE / "distributed_suite_gloo.txt").read_text())
    allowed, names = _exceptions(run), []
    if torch.__version__.startswith(LISTED_FOR):  # what gloo skips costs as many processes as what it passes
        names = [name for name, verdict in gloo.items() if verdict == "pass"]
    if run == "as_gloo":
        names = sorted({*_exceptions("lowcomm"), *(name for name in names if "profiler" in name)})  # which reads titles
        gloo = {name: gloo[name] for name in names}
    ended = ranks.run_command(
        [sys.executable, HERE / "distributed_suite.py", run, *(["--tests", *names] if names else [])],
        deadline_s=420,
        cwd=tmp_path,
        env={"TMPDIR": str(tmp_path)},
    )
    code, text = ended.code, ended.text
    got = _verdicts(ended.out)
    wrong = {test: verdict for test, verdict in got.items() if verdict == "fail" and allowed.get(test) != "fail"}
    assert not wrong, f"{wrong}\n{text[-20000:]}"
    if torch.__version__.startswith(LISTED_FOR):
        missing = {
            test: got.get(test) for test, verdict in gloo.items() if verdict == "pass" and got.get(test) != "pass"
        }
        assert missing == allowed, f"expected the exceptions of the list, {allowed}, got {missing}\n{text[-20000:]}"
    passed = list(got.values()).count("pass")
    assert passed >= least, f"{passed} tests passed; the driver ended with {code}\n{text[-5000:]}"
