"""The stub of the extension says what the extension has."""

import ast
from pathlib import Path

from torch_lowcomm import _C

STUB = ast.parse(Path(_C.__file__).with_name("_C.pyi").read_text())
IGNORED = {"__init__", "__module__", "__doc__", "__new__", "__repr__", "__str__"}


def _members(body):
    return {
        n.name if hasattr(n, "name") else n.target.id
        for n in body
        if isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.AnnAssign))
    }


def test_module_names():
    has = {name for name in dir(_C) if not name.startswith("__")}
    assert _members(STUB.body) == has


def test_class_members():
    for node in STUB.body:
        if isinstance(node, ast.ClassDef):
            has = {n for n in vars(getattr(_C, node.name)) if n not in IGNORED and not n.startswith("_pybind11")}
            assert _members(node.body) - IGNORED == has, node.name


def test_signatures():
    """Argument names in order, as pybind states them in the first line of the docstring."""
    for node in ast.walk(STUB):
        if not isinstance(node, ast.ClassDef) and not isinstance(node, ast.Module):
            continue
        owner = getattr(_C, node.name) if isinstance(node, ast.ClassDef) else _C
        for function in node.body:
            if not isinstance(function, ast.FunctionDef) or function.name.startswith("__") or function.decorator_list:
                continue
            line = getattr(owner, function.name).__doc__.splitlines()[0]
            for argument in function.args.args + function.args.kwonlyargs:
                assert f"{argument.arg}:" in line, (function.name, line)
