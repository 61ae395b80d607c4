"""A variable LOWCOMM_… that nothing reads is warned about, once, with the nearest name that is read."""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch_lowcomm as lc
from torch_lowcomm import _variables

ROOT = Path(__file__).parents[3]


def test_the_known_names_are_those_that_the_sources_read():
    files = [*(ROOT / "csrc").rglob("*.cpp"), *(ROOT / "csrc").rglob("*.h"), *(ROOT / "torch_lowcomm").rglob("*.py")]
    files += [ROOT / "setup.py", ROOT / "_torch_lowcomm_autoload.py"]
    texts = [path.read_text() for path in files if path.name != "_variables.py"]
    read = {name for text in texts for name in re.findall(r'"(LOWCOMM_[A-Z_]+)"', text)}
    assert read == set(_variables.KNOWN)


def test_the_page_of_settings_has_every_variable_and_option():
    page = (ROOT / "docs" / "settings.md").read_text()
    named = set(re.findall(r"`(LOWCOMM_[A-Z_]+)`", page))
    assert named == set(_variables.KNOWN)
    options = re.findall(r"^\| `(\w+)` \| (?:`LOWCOMM_\w+` )?\|", page, re.MULTILINE)
    signature = re.search(r"__init__\((.*?)\)", lc.Options.__init__.__doc__, re.DOTALL)[1]
    assert options and set(options) == set(re.findall(r"(\w+): ", signature)) - {"self"}


def test_a_misspelt_name_has_the_one_that_may_be_meant():
    names = ["LOWCOMM_SECRETFILE", "LOWCOMM_POLICIES", "LOWCOMM_XYZ", "LOWCOMM_RATE", "LOWCOMM_TEST_STEPS", "PATH"]
    assert _variables.unknown(names) == [
        "LOWCOMM_POLICIES (did you mean LOWCOMM_POLICY?)",
        "LOWCOMM_SECRETFILE (did you mean LOWCOMM_SECRET_FILE?)",
        "LOWCOMM_XYZ",
    ]


def test_a_process_warns_once():
    lines = "import torch.distributed as dist\n"
    lines += "for _ in range(2):\n"
    lines += "    dist.init_process_group('lowcomm', store=dist.HashStore(), rank=0, world_size=1)\n"
    lines += "    dist.destroy_process_group()\n"
    environment = {**os.environ, "LOWCOMM_SECRETFILE": "/nowhere"}
    done = subprocess.run([sys.executable, "-c", lines], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("LOWCOMM_SECRETFILE (did you mean LOWCOMM_SECRET_FILE?)") == 1


def test_the_glossary_is_in_alphabetical_order():
    page = (ROOT / "docs" / "glossary.md").read_text().partition("| --- | --- |\n")[2]
    words = [line.split("|")[1].strip().lower() for line in page.splitlines()]
    assert len(words) > 50 and words == sorted(set(words))
