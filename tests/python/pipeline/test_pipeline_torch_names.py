"""The names of torch's pipelining that lc.pipeline overrides or uses, which torch 2.11 to 2.15 have in common: all but two."""

import ast
import inspect
from pathlib import Path

import pytest
import stages_case as case
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

import torch_lowcomm as lc

# Methods of a stage that lc.pipeline.Stage overrides, with the parameters that torch's schedules give them by place.
OVERRIDDEN = {
    "__init__": ("submodule", "stage_index", "num_stages", "device", "input_args", "output_args"),
    "clear_runtime_states": (),
    "get_fwd_recv_ops": ("fwd_chunk_id",),
    "get_fwd_send_ops": ("fwd_chunk_id",),
    "get_bwd_recv_ops": ("bwd_chunk_id",),
    "get_bwd_send_ops": ("bwd_chunk_id",),
    "forward_one_chunk": ("fwd_chunk_id",),
    "backward_one_chunk": ("bwd_chunk_id",),
}
LATER = {"_send_meta": ("meta", "dst_stage"), "_recv_meta": ("src_stage",)}  # which not every torch has
OVERRIDDEN |= {name: parameters for name, parameters in LATER.items() if hasattr(PipelineStage, name)}
# What else of a stage is read, here or in step.py.
STAGE = {
    "args_recv_info",
    "backward_state",
    "bwd_cache",
    "dw_runner",
    "fwd_cache",
    "group",
    "group_rank",
    "has_backward",
    "is_first",
    "is_last",
    "num_stages",
    "stage_index",
    "stage_index_to_group_rank",
    "submod",
}
# Of a schedule. `_stage` and `_num_stages` are those of one stage a rank, `_stages` of several.
SCHEDULE = {"_n_microbatches", "step", "eval"}
ONE_STAGE, STAGES = {"_stage", "_num_stages"}, {"_stages"}
OUR_OWN = {"_lowcomm_compared"}  # of a schedule

FOLDER = Path(inspect.getfile(lc.pipeline)).parent


def _read(file, *objects):
    """Attributes of these variables, and of super(), that a file's code names."""
    found = set()
    for node in ast.walk(ast.parse((FOLDER / file).read_text())):
        if isinstance(node, ast.Attribute):
            called = isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super"
            if called or (isinstance(node.value, ast.Name) and node.value.id in objects):
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
    of_stages = _read("stage.py", "self") | _read("step.py", "stage") | _read("schedule.py", "stage")
    assert of_stages - _own(lc.pipeline.Stage) - set(OVERRIDDEN) - {"_num_stages"} == STAGE
    of_schedules = _read("step.py", "schedule") | _read("schedule.py", "self")
    assert of_schedules - {"__init__"} == SCHEDULE | ONE_STAGE | STAGES | OUR_OWN


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


def _there(r, name):
    r.init("lowcomm")
    schedule, stages = case.build(r.rank, r.size, name)
    for stage in stages:
        for attribute in STAGE:
            assert hasattr(stage, attribute), attribute
    for attribute in SCHEDULE | (ONE_STAGE if case.SCHEDULES[name][1] == 1 else STAGES):
        assert hasattr(schedule, attribute), attribute
    assert hasattr(schedule, "_internal_losses")
    dist.barrier()  # nobody leaves while the other still joins
    dist.destroy_process_group()


@pytest.mark.parametrize("name", case.SCHEDULES)
def test_torch_has_them(pair, name):
    pair(_there, name)
