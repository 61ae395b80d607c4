"""Citations in code and pages: the papers' own sections, each for what stands in it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = ("csrc", "torch_lowcomm", "benchmarks", "examples", "docs")
# Sections of each paper that anything here is made of.
SECTIONS = {
    "2506.21263": {
        "2.3": "one-step delay",
        "2.4.2": "quantized low-rank factors",
        "2.4.3": "adaptive rank and interval",
        "4": "experiments",
        "4.1.3": "baselines",
        "4.2.1": "convergence",
        "4.3": "ablation",
    },
    "Just One Byte": {"2": "method", "3": "experiments: the byte"},
    "QSDP": {"3.3": "FSDP with compression"},
}


def texts():
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    paths += [ROOT / "README.md"]
    for path in paths:
        if path.suffix in {".h", ".cpp", ".cu", ".cuh", ".inl", ".py", ".md"}:
            yield path, re.sub(r"\n\s*(//|#)?\s*", " ", path.read_text())


@pytest.mark.parametrize("paper", SECTIONS)
def test_sections_are_the_papers_own(paper):
    cited = set()
    for path, text in texts():
        for found in re.finditer(
            rf"{paper}[^;.]{{0,40}}?, sections? (\d[\d.]*\d|\d)((?:(?:, | and )\d[\d.]*\d)*)", text
        ):
            numbers = re.findall(r"\d[\d.]*\d|\d", found[1] + found[2])
            assert set(numbers) <= set(SECTIONS[paper]), (path, found[0])
            cited |= set(numbers)
    assert cited  # the pattern finds what it looks for


def test_one_sentence_on_the_warm_up():
    said = "DiLoCoX's paper gives no number; a tenth of all is our choice"
    for name in ("torch_lowcomm/diloco/options.py", "csrc/diloco/diloco_options.h", "examples/train_diloco.py"):
        text = next(text for path, text in texts() if path == ROOT / name)
        assert said in text, name
    assert not any("a tenth of all is the paper's" in text for _, text in texts())
