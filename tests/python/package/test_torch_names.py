"""tests/torch_names.py: its list has every private name of torch's that the library uses, and the installed torch has them."""

import ast
import functools
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch._C import _distributed_c10d as distributed

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch_names

TESTS = Path(__file__).parents[2]
ROOT = TESTS.parent
SITE = Path(torch.__file__).parents[1]
FILES = [*sorted((ROOT / "torch_lowcomm").rglob("*.py")), ROOT / "_torch_lowcomm_autoload.py"]
# Not torch's: Python's, those of modules (nn.Module promises `_modules` to its subclasses), and of the package transformers.
OTHERS = {"_exit", "_fields", "_getframe", "_modules", "_attn_implementation", "_name_or_path"}


def _private(name):
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def _own():
    """Private names that this library defines, in Python or in its extension."""
    found = set()
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                found.add(node.name)
            elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
                found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    for file in (ROOT / "csrc" / "bindings").rglob("*"):
        found |= set(re.findall(r'"(_\w+)"', file.read_text())) if file.suffix in (".cpp", ".h") else set()
    return found


def _used(file):
    """Private names that are neither defined here nor Python's: attributes, and imports of or from private modules."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and _private(node.attr):
            yield node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and _private(name.value):
                yield name.value
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            private = any(map(_private, node.module.split(".")))
            yield from (name.name for name in node.names if private or _private(name.name))


def test_the_list_has_every_private_name_that_the_library_uses():
    listed = set().union(*(uses.names | uses.later | set(uses.calls) for uses in torch_names.USES))
    listed |= set().union(*torch_names.BUILT.values())
    # Public in torch.distributed, or owners in the list.
    elsewhere = {"_C", "Store", "ProcessGroupNCCL", "AllGather", "ReduceScatter"}
    unlisted = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in FILES
        for name in _used(file)
        if name not in listed | elsewhere | OTHERS | _own()
    }
    assert not unlisted


def test_every_later_name_is_asked_for():
    """A name that not every torch has is looked up by a string, or through a dictionary of strings."""
    text = "\n".join(file.read_text() for file in FILES)
    for uses in torch_names.USES:
        for name in uses.later - {"buffer"} - set(torch_names.LATER):  # buffer: where there is take_buffer
            assert f'"{name}"' in text or f"state.{name}" in text, name


def test_the_installed_torch_has_them():
    assert torch_names.missing(SITE) == []
    for owner, names in torch_names.BUILT.items():
        assert [name for name in names if not hasattr(getattr(distributed, owner), name)] == []


@pytest.mark.parametrize(
    ("file", "replacement", "expected"),
    [
        (
            "distributed/fsdp/_fully_shard/_fsdp_param.py",
            ("_sharded_local_tensor", "_local_shard"),
            "FSDPParam has no _sharded_local_tensor",
        ),
        ("distributed/tensor/_utils.py", None, "the module has no compute_local_shape_and_global_offset"),
    ],
    ids=["a name is gone", "a file is gone"],
)
def test_a_change_of_torchs_is_found(tmp_path, file, replacement, expected):
    for uses in torch_names.USES:
        (tmp_path / "torch" / uses.file).parent.mkdir(parents=True, exist_ok=True)
        if (SITE / "torch" / uses.file).exists():
            shutil.copy(SITE / "torch" / uses.file, tmp_path / "torch" / uses.file)
    changed = tmp_path / "torch" / file
    if replacement:
        changed.write_text(changed.read_text().replace(*replacement))
    else:
        changed.unlink()
    assert any(expected in line for line in torch_names.missing(tmp_path))
