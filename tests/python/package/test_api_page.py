"""docs/api.md has every public name, so that the HTML's search finds it."""

import re
from pathlib import Path

import torch_lowcomm as lc

PAGE = Path(__file__).parents[3] / "docs" / "api.md"
PARTS = ("ddp", "diloco", "fsdp", "pipeline", "planner", "seed_replay", "subspace")
_DIRECTIVE = re.compile(r"^\.\. (\w+):: (\S+)$", re.MULTILINE)


def _described():
    """The whole names of what the page describes, modules too."""
    module, found = "", set()
    for directive, name in _DIRECTIVE.findall(PAGE.read_text()):
        if directive.endswith("module"):
            module = name
        whole = name if name.startswith("torch_lowcomm") else f"{module}.{name}"
        if directive != "currentmodule":
            found.add(whole)
    return found


def test_every_public_name_is_described():
    parts = {part: getattr(lc, part) for part in PARTS}
    public = {f"torch_lowcomm.{name}" for name in lc.__all__ if name != "__version__"}
    public |= {f"torch_lowcomm.{part}.{name}" for part, module in parts.items() for name in module.__all__}
    # Names of a part that the package has too are described there.
    public -= {f"torch_lowcomm.{part}.{name}" for part in PARTS for name in lc.__all__}
    assert public - _described() == set()
