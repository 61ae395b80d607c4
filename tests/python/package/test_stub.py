"""The stub of the extension says what the extension has, and the extension has what the stub says.

pybind states a function's signature in the first line of its docstring, in Python's own syntax: both sides are parsed.
"""

import ast
import re
from pathlib import Path

import pytest

from torch_lowcomm import _C

STUB = ast.parse(Path(_C.__file__).with_name("_C.pyi").read_text())
OWNERS = {"_C": (STUB, _C)} | {n.name: (n, getattr(_C, n.name)) for n in STUB.body if isinstance(n, ast.ClassDef)}
IMPLIED = {"__module__", "__doc__", "__new__", "__repr__", "__str__"}  # every object's
NO_DEFAULT = "(none)"


def _stated(owner):
    """{name: kind} of what a module or class of the stub states."""
    kinds = {}
    for node in owner.body:
        if isinstance(node, ast.FunctionDef):
            kinds[node.name] = "value" if node.decorator_list else "function"  # the only decorator is property
        elif isinstance(node, ast.ClassDef):
            kinds[node.name] = "class"
        elif isinstance(node, ast.AnnAssign):
            kinds[node.target.id] = "value"
    return kinds


def _present(owner):
    """{name: kind} of what a module or class of the extension has."""
    kinds = {}
    for name, member in vars(owner).items():
        if name in IMPLIED or name.startswith("_pybind11") or (owner is _C and name.startswith("__")):
            continue
        if isinstance(member, type):
            kinds[name] = "class"
        elif callable(member):
            if name != "__init__" or _signature_line(member):  # pybind puts one that refuses where none is bound
                kinds[name] = "function"
        else:
            kinds[name] = "value"
    return kinds


def _signature_line(function):
    line = (function.__doc__ or "").partition("\n")[0]
    return line if "->" in line else ""


def _arguments(function):
    """[(name, keyword-only, default)] in order, self left out; `function` is a syntax tree."""
    a = function.args
    assert not (a.posonlyargs or a.vararg or a.kwarg), ast.unparse(function)
    defaults = [None] * (len(a.args) - len(a.defaults)) + a.defaults
    listed = [(argument.arg, False, default) for argument, default in zip(a.args, defaults, strict=True)]
    listed += [(argument.arg, True, default) for argument, default in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    return [(n, only, NO_DEFAULT if d is None else ast.unparse(d)) for n, only, d in listed if n != "self"]


@pytest.mark.parametrize("owner", OWNERS)
def test_names_and_kinds(owner):
    stub, extension = OWNERS[owner]
    assert _stated(stub) == _present(extension)


@pytest.mark.parametrize("owner", OWNERS)
def test_signatures(owner):
    """The names of the arguments, their order, which are keyword-only, and the defaults; constructors too."""
    node, has = OWNERS[owner]
    compared = 0
    for function in node.body:
        if not isinstance(function, ast.FunctionDef) or function.decorator_list:
            continue
        line = _signature_line(getattr(has, function.name))
        assert line, f"{function.name}: pybind states no signature"
        bound = _arguments(ast.parse(f"def {line}: ...").body[0])
        stated = _arguments(function)
        # An argument that the binding leaves without a name is `arg0` there; the stub may call it anything.
        named = [(s[0] if re.fullmatch(r"arg\d+", b[0]) else b[0], *b[1:]) for b, s in zip(bound, stated, strict=False)]
        assert stated == named + bound[len(named) :], f"{owner}.{function.name}: {line}"
        compared += 1
    assert compared, f"no function of {owner} was compared"


def test_constructors_are_among_them():
    """The comparison sees all of these: the classes that a user or the package makes."""
    for name in ("Codec", "Options", "Layout"):
        assert _stated(OWNERS[name][0])["__init__"] == _present(getattr(_C, name))["__init__"] == "function"
    assert "__init__" not in _present(_C.LowcommBackend), "a backend is made by create_backend"
