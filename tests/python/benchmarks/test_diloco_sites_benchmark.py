"""`python benchmarks diloco_sites --quick`: its gates hold, and its JSON has what it printed."""

import json
import sys

import pytest
import ranks
from links import ROOT


@pytest.mark.slow
def test_one_message_a_site(tmp_path):
    file = tmp_path / "sites.json"
    command = [sys.executable, str(ROOT / "benchmarks"), "diloco_sites", "--quick", "--json", str(file)]
    status, out, err = ranks.run_command(command, deadline_s=180, cwd=tmp_path)
    assert status == 0, f"{out}\n{err}"
    content = json.loads(file.read_text())
    assert [row["replicas"] for row in content["rows"]] == [1, 2, 4]
    assert len(content["gates"]) == 8 and all(gate["pass"] for gate in content["gates"])
    assert f"takes {content['joins']['taken_bytes']} bytes" in out
