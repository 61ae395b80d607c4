"""The private names of torch's on which torch_lowcomm relies, and whether a torch has them; without a build or an import of it.

    python tests/torch_names.py FOLDER...

A folder is a site-packages, or an unzipped wheel of torch. The program reads the sources and the stubs in it, prints what is
missing, and ends with 1 where anything is. `tests/python/package/test_torch_names.py` checks that the list is whole, and the
installed torch against it.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Uses:
    """What is used of one class or module of torch."""

    file: str  # in the folder torch
    owner: str  # the class or function; "" for the module
    names: frozenset[str]
    calls: dict[str, tuple[str, ...]] = field(default_factory=dict)  # method: its first parameters, given by place
    later: frozenset[str] = frozenset()  # which not every torch has, and whose absence the code asks for


def _uses(
    file: str, owner: str, names: str = "", calls: dict[str, tuple[str, ...]] | None = None, later: str = ""
) -> Uses:
    return Uses(file, owner, frozenset(names.split()), calls or {}, frozenset(later.split()))


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
# What else of a stage is read. `args_recv_info` and `grad_recv_info` are dictionaries by micro-batch.
_STAGE = (
    "args_recv_info grad_recv_info backward_state bwd_cache dw_runner group group_rank has_backward is_first is_last "
    "num_stages stage_index stage_index_to_group_rank submod"
)
STAGE = frozenset(_STAGE.split())
# Of a schedule. `_stage` and `_num_stages` are those of one stage a rank, `_stages` of several.
SCHEDULE = frozenset(["_n_microbatches", "step", "eval"])
ONE_STAGE, STAGES = frozenset(["_stage", "_num_stages"]), frozenset(["_stages"])
LEFT = frozenset(["_internal_losses", "fwd_recv_ops", "bwd_recv_ops"])  # what a step that failed leaves in one

_PIPELINING, _FSDP = "distributed/pipelining", "distributed/fsdp/_fully_shard"
_C10D = "_C/_distributed_c10d.pyi"
USES = (
    _uses(f"{_PIPELINING}/stage.py", "PipelineStage", _STAGE, OVERRIDDEN | LATER, " ".join(LATER)),
    _uses(f"{_PIPELINING}/_recv_buffers.py", "_RecvInfo", later="buffer take_buffer"),
    _uses(f"{_PIPELINING}/schedules.py", "_PipelineSchedule", "_n_microbatches _internal_losses"),
    _uses(f"{_PIPELINING}/schedules.py", "PipelineScheduleSingle", "_stage _num_stages step eval"),
    _uses(f"{_PIPELINING}/schedules.py", "PipelineScheduleMulti", "_stages step eval"),
    _uses(f"{_PIPELINING}/schedules.py", "_PipelineScheduleRuntime", later="fwd_recv_ops bwd_recv_ops"),
    _uses(
        f"{_PIPELINING}/_utils.py", "", later="_TensorMeta _DTensorMeta _StageForwardMeta _StageBackwardMeta"
    ),  # shapes.py reads them from messages
    _uses("distributed/tensor/placement_types.py", "", "Shard Replicate Partial _StridedShard"),
    _uses("distributed/_mesh_layout.py", "", later="_MeshLayout"),
    _uses("distributed/tensor/_utils.py", "", "compute_local_shape_and_global_offset"),
    _uses("distributed/tensor/_api.py", "DTensor", "_local_tensor"),
    _uses(f"{_FSDP}/_fsdp_api.py", "AllGather", "allocate __call__"),
    _uses(f"{_FSDP}/_fsdp_api.py", "ReduceScatter", "allocate __call__"),
    _uses(
        f"{_FSDP}/_fsdp_param_group.py",
        "FSDPParamGroup",
        "fsdp_params device mesh_info offload_policy is_unsharded _is_hsdp _all_gather_comm _reduce_scatter_comm "
        "_all_gather_result _all_reduce_process_group _all_reduce_hook",
        {"_prefetch_unshard": ("target_fsdp_param_group", "pass_type")},
        later="_reduce_scatter_param_indices",
    ),
    _uses(
        f"{_FSDP}/_fsdp_param.py",
        "FSDPParam",
        "sharded_param mp_policy _sharded_param_data _sharded_local_tensor _unsharded_param",
        later="sharded_grad_dtype",
    ),
    _uses(f"{_FSDP}/_fsdp_collectives.py", "AllGatherResult", "all_gather_work"),
    _uses(f"{_FSDP}/_fsdp_common.py", "FSDPMeshInfo", "shard_process_group"),
    _uses(f"{_FSDP}/_fsdp_common.py", "HSDPMeshInfo", "shard_process_group replicate_process_group"),
    _uses(f"{_FSDP}/_fsdp_state.py", "FSDPState", later="_fsdp_param_group _fsdp_param_groups"),
    _uses(
        f"{_FSDP}/_fully_shard.py", "FSDPModule", "_get_fsdp_state set_custom_all_gather set_custom_reduce_scatter"
    ),
    _uses("distributed/debug/_frontend.py", "", "DebugHandler NavLink Route fetch_all"),
    _uses("distributed/debug/_debug_handlers.py", "", "default_handlers"),
    _uses(_C10D, "", "_register_handler"),
    _uses("_compile.py", "", "_disable_dynamo"),
    _uses("_tensor.py", "Tensor", "_post_accumulate_grad_hooks"),
    _uses("autograd/variable.py", "Variable", "_execution_engine"),
    _uses("_C/__init__.pyi", "", "_current_graph_task_id"),
    _uses(_C10D, "ProcessGroupGloo", "Options create_device create_default_device"),
    _uses(_C10D, "ProcessGroup", "_device_types _register_backend _set_default_backend"),
    # as_gloo.py reads the group's name and ranks in the frame of this function.
    _uses(
        "distributed/distributed_c10d.py", "_new_process_group_helper", "group_name global_ranks_in_group"
    ),
    _uses("distributed/distributed_c10d.py", "", "default_pg_timeout ProcessGroupGloo"),
)  # fmt: skip
# Names of classes of C++ that no stub has: only an installed torch can say.
BUILT = {"ProcessGroupGloo": ("_Options",)}
# One of them must be there.
EITHER = ({"_fsdp_param_group", "_fsdp_param_groups"},)


class Sources:
    """The sources of one torch."""

    def __init__(self, folder: Path) -> None:
        self._root = folder / "torch"
        self._trees: dict[str, ast.Module] = {}

    @property
    def version(self) -> str:
        """What torch/version.py says."""
        file = self._root / "version.py"
        if not file.exists():
            return "none"
        found = [n.value for n in ast.walk(ast.parse(file.read_text())) if _assigns(n, "__version__")]
        return str(ast.literal_eval(found[0]))

    def tree(self, file: str) -> ast.Module | None:
        """A file of it, parsed; None where there is none."""
        path = self._root / file
        if file not in self._trees and path.exists():
            self._trees[file] = ast.parse(path.read_text())
        return self._trees.get(file)

    def _find(self, file: str, name: str) -> tuple[str, ast.ClassDef | ast.FunctionDef] | None:
        """A class or function of a module, and the file that has it; it may have been imported."""
        for node in ast.walk(self.tree(file) or ast.Module([], [])):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
                return file, node
        for node in ast.walk(self.tree(file) or ast.Module([], [])):
            if isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == name for a in node.names):
                at = Path(file).parents[node.level - 1] if node.level else Path()
                module = (node.module or "").removeprefix("torch.") if not node.level else node.module or ""
                other = str(at / module.replace(".", "/")) + ".py"
                if other != file and self.tree(other):
                    return self._find(other, name)
        return None

    def owners(self, file: str, name: str) -> list[ast.ClassDef | ast.FunctionDef]:
        """A class and its bases, as far as torch has them; or a function."""
        found, todo = [], [(file, name)]
        while todo:
            there = self._find(*todo.pop())
            if there is not None and there[1] not in found:
                found.append(there[1])
                bases = there[1].bases if isinstance(there[1], ast.ClassDef) else []
                todo += [(there[0], base.id) for base in bases if isinstance(base, ast.Name)]
        return found

    def names(self, uses: Uses) -> set[str]:
        """Every name that a class has or assigns to `self`, that a function assigns or takes, or that a module has."""
        if not uses.owner:
            tree = self.tree(uses.file)
            return _bound(tree, functions=False) if tree else set()
        return set().union(*(_bound(node, functions=True) for node in self.owners(uses.file, uses.owner)))

    def parameters(self, uses: Uses, method: str) -> tuple[str, ...] | None:
        """The parameters of a method, without `self`; None where there is none of this name."""
        for owner in self.owners(uses.file, uses.owner):
            for node in owner.body:
                if isinstance(node, ast.FunctionDef) and node.name == method:
                    taken = tuple(a.arg for a in node.args.posonlyargs + node.args.args)
                    static = any(getattr(d, "id", "") == "staticmethod" for d in node.decorator_list)
                    return taken if static else taken[1:]
        return None


def _assigns(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Assign) and any(getattr(target, "id", "") == name for target in node.targets)


def _bound(node: ast.AST, *, functions: bool) -> set[str]:
    """Names that a piece of code defines, imports or assigns; those of attributes and parameters too with `functions`."""
    found: set[str] = set()
    for inner in ast.walk(node):
        if isinstance(inner, (ast.ClassDef, ast.FunctionDef)):
            found.add(inner.name)
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            found.add(inner.id)
        elif isinstance(inner, (ast.Import, ast.ImportFrom)):
            found |= {a.asname or a.name for a in inner.names}
        elif functions and isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            found.add(inner.attr)
        elif functions and isinstance(inner, ast.arg):
            found.add(inner.arg)
    return found


def missing(folder: Path) -> list[str]:
    """What is used of torch and not there, a line each."""
    sources, found, later = Sources(folder), [], set()
    for uses in USES:
        there = sources.names(uses)
        later |= there & uses.later
        where = f"{uses.file}: {uses.owner or 'the module'}"
        found += [f"{where} has no {name}" for name in sorted(uses.names - there)]
        for method, wanted in uses.calls.items():
            taken = sources.parameters(uses, method)
            if taken is None and method not in uses.later:
                found.append(f"{where} has no method {method}")
            elif taken is not None and taken[: len(wanted)] != wanted:
                found.append(f"{where}.{method} takes {', '.join(taken) or 'nothing'}, expected {', '.join(wanted)}")
    return found + [f"there is none of {', '.join(sorted(names))}" for names in EITHER if not names & later]


def main(folders: list[str]) -> int:
    """Checks each folder, and returns the exit status."""
    if not folders:
        print(__doc__, file=sys.stderr)
        return 2
    failed = False
    for folder in map(Path, folders):
        lines = missing(folder)
        failed |= bool(lines)
        print(f"torch {Sources(folder).version} in {folder}: {f'{len(lines)} missing' if lines else 'has all names'}")
        for line in lines:
            print(f"  {line}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
