"""The names of torch's pipelining that lc.pipeline overrides or uses (tests/torch_names.py), against the installed torch."""

import ast
import inspect
import sys
from pathlib import Path

import pytest
import stages_case as case
from torch.distributed.pipelining import PipelineStage

import torch_lowcomm as lc

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch_names as names

OVERRIDDEN = names.OVERRIDDEN | {
    name: parameters for name, parameters in names.LATER.items() if hasattr(PipelineStage, name)
}
OUR_OWN = {"_lowcomm_compared"}  # of a schedule

FOLDER = Path(inspect.getfile(lc.pipeline)).parent


def _read(file, *objects):
    """Attributes of these variables and attributes, and of super(), that a file's code names."""
    found = set()
    for node in ast.walk(ast.parse((FOLDER / file).read_text())):
        if isinstance(node, ast.Attribute):
            called = isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super"
            if called or getattr(node.value, "id", getattr(node.value, "attr", None)) in objects:
                found.add(node.attr)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
            of, name = node.args[:2]
            if isinstance(of, ast.Name) and of.id in objects and isinstance(name, ast.Constant):
                found.add(name.value)
    return found


def _own(kind):
    """Names that a class has by itself: its methods, and what they assign."""
    tree = ast.parse(inspect.getsource(kind))
    assigned = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    return assigned | set(vars(kind)) - set(OVERRIDDEN)


def test_the_lists_have_all_names_that_the_code_has():
    overrides = {
        name
        for name in vars(lc.pipeline.Stage)
        if any(inspect.isfunction(vars(kind).get(name)) for kind in PipelineStage.__mro__[:2])
    }
    assert overrides == set(OVERRIDDEN)
    of_stages = _read("stage.py", "self") | _read("stage_messages.py", "stage", "_stage")
    of_stages |= _read("step.py", "stage") | _read("schedule.py", "stage")
    of_stages |= _read("../subspace/generate.py", "stage") & {"submod"}
    assert of_stages - _own(lc.pipeline.Stage) - set(OVERRIDDEN) - {"_num_stages"} == names.STAGE
    of_schedules = _read("step.py", "schedule") | _read("schedule.py", "self")
    assert of_schedules - {"__init__"} == names.SCHEDULE | names.ONE_STAGE | names.STAGES | OUR_OWN


def test_what_is_overridden_takes_what_it_took():
    for name, parameters in OVERRIDDEN.items():
        torchs = list(inspect.signature(getattr(PipelineStage, name)).parameters.values())[1:]
        assert tuple(p.name for p in torchs[: len(parameters)]) == parameters, name
        assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in torchs), name
        taken = inspect.signature(getattr(lc.pipeline.Stage, name))
        taken.bind(
            None,
            *(p.name for p in torchs if p.default is p.empty),
            **{p.name: 0 for p in torchs if p.default is not p.empty},
        )


@pytest.mark.parametrize("name", case.NAMES)
@pytest.mark.on("pair", group={})
def test_torch_has_them(r, name):
    schedule, stages = case.build(r.rank, r.size, name)
    for stage in stages:
        for attribute in names.STAGE:
            assert hasattr(stage, attribute), attribute
    for attribute in names.SCHEDULE | (names.ONE_STAGE if case.SCHEDULES[name][1] == 1 else names.STAGES):
        assert hasattr(schedule, attribute), attribute
    assert hasattr(schedule, "_internal_losses")
