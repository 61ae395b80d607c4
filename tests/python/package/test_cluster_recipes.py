"""DeepSpeed and Ray Train as docs/recipes.md has them; the files for Slurm and Kubernetes on hosts of the lab."""

import os
import re
import secrets
import sys
import textwrap

import pytest
import ranks
import recipes
from linklab import Lab
from links import ENV, expect_labs

from torch_lowcomm import _C

PATH = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"], "/usr/sbin", "/sbin"])
POLICY = ";".join(f"{op}=qsgd8:bucket=1024" for op in ("all_reduce", "reduce_scatter", "all_gather"))
# What ranks write after a recipe's last step: whether they have learned, what their model is, what every step has coded.
_SAY = """
import pathlib
import torch_lowcomm as lc
ops = [(name, op) for group in lc.stats().values() for name, op in group.items()]
coded = sorted(name for name, op in ops if op["calls"] - op["exact_calls"] >= 60 and op["ratio"] > 3)
with torch.no_grad():
    values = model(torch.eye(64)).tolist()
pathlib.Path("FOLDER", f"said{torch.distributed.get_rank()}").write_text(f"{loss.item() < 0.2} {values} {coded}")
"""


def _expect_trained(folder, program, step, coded, *launcher, **env):
    """Two ranks of a program, whose loop ends with `step`, learn one model and code these operations in every step."""
    loop, after = program.split(step)
    say = textwrap.indent(_SAY.replace("FOLDER", str(folder)), " " * (len(step) - len(step.lstrip()) - 4))
    (folder / "train.py").write_text(loop + step + say + after)
    env |= ENV | {"LOWCOMM_POLICY": POLICY, "LOWCOMM_MIN_BYTES": "0", "PATH": PATH}
    ended = ranks.run_command([*launcher, "train.py"], deadline_s=recipes.DEADLINE_S, cwd=folder, env=env)
    assert ended.code == 0, ended.text
    said = [(folder / f"said{rank}").read_text() for rank in range(2)]
    assert said[0] == said[1] and said[0].startswith("True ") and said[0].endswith(f" {coded}"), said


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "gradients"), [(1, "all_reduce"), (3, "reduce_scatter")])
def test_deepspeed(tmp_path, stage, gradients):
    recipes.needs("deepspeed")
    config = f'"stage": {stage}, "stage3_param_persistence_threshold": 0'  # else small parameters stay whole
    program = recipes.program("DeepSpeed").replace('"stage": 3', config)
    launcher = ranks.torchrun(2, "--standalone")
    _expect_trained(tmp_path, program, "    model.step()\n", ["all_gather", gradients], *launcher)


@pytest.mark.slow
def test_ray_train(tmp_path):
    recipes.needs("ray", "pandas", "pyarrow")
    env = {"HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}
    program = recipes.program("Ray Train")
    _expect_trained(tmp_path, program, "        opt.zero_grad()\n", ["all_reduce"], sys.executable, **env)


# What the ranks of a cluster do: they make a group, encrypted, each rank at the port that is open for it.
_RANK = """
import os, pathlib
import torch.distributed as dist
import torch_lowcomm as lc

dist.init_process_group("lowcomm")
port = f":{29600 + int(os.environ['LOCAL_RANK']):04X} "
listens = any(port in line and " 0A " in line for line in pathlib.Path("/proc/net/tcp").read_text().splitlines())
secret = all(connection["cipher"] for connection in lc.connections()["0"])
dist.barrier()  # a peer that ends closes its connections
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {secret=} {listens=}\\n", end="", flush=True)  # one write
dist.destroy_process_group()
"""
# As srun: the tasks that the batch file asks for, on the lab's hosts, with the variables that Slurm sets.
_SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
export SLURM_NTASKS=$((SLURM_NNODES * TASKS))
for ((task = 0; task < SLURM_NTASKS; ++task)); do
  export SLURM_PROCID=$task SLURM_NODEID=$((task / TASKS)) SLURM_LOCALID=$((task % TASKS))
  ip netns exec "$HOST$SLURM_NODEID" "$@" &
done
for job in $(jobs -p); do wait "$job" || exit; done
"""


@pytest.fixture
def program(tmp_path):
    """The ranks' program, and beside it what the files of a cluster read and call."""
    expect_labs()
    if not _C.tls_library():
        pytest.skip("this build has no OpenSSL")
    scontrol = "#!/bin/sh\nprintf '%s\\n' 10.77.0.1 10.77.0.2\n"
    texts = {"train.py": _RANK, "srun": _SRUN, "scontrol": scontrol, ".lowcomm": secrets.token_urlsafe(32)}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o700)
    return tmp_path / "train.py"


def _expect_ranks(size, jobs):
    ended = [job.wait(recipes.DEADLINE_S)[0] for job in jobs]
    said = sorted(line for one in ended for line in one.output.splitlines() if line.startswith("rank "))
    assert said == [f"rank {rank} of {size}: secret=True listens=True" for rank in range(size)], ended
    assert not any(one.code for one in ended), ended


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_slurm(program, launcher):
    batch = recipes.ROOT / f"examples/slurm/{launcher}.sbatch"
    nodes, tasks = re.findall(r"^#SBATCH --n\S+=(\d)$", batch.read_text(), re.MULTILINE)
    slurm = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": nodes, "SLURM_CPUS_PER_TASK": "4", "TASKS": tasks}
    with Lab(hosts=2) as lab:
        here = {"PATH": f"{program.parent}:{PATH}", "HOME": str(program.parent), "HOST": lab.namespace(0)[:-1]}
        _expect_ranks(4, [lab.start_on(0, ["bash", str(batch), str(program)], env=ENV | slurm | here)])


@pytest.mark.slow
def test_kubernetes(program):
    yaml = pytest.importorskip("yaml", reason="needs PyYAML: pip install PyYAML")
    service, job = yaml.safe_load_all((recipes.ROOT / "examples/kubernetes.yaml").read_text())
    template = job["spec"]["template"]
    assert service["spec"]["selector"] == template["metadata"]["labels"]
    assert service["metadata"]["name"] == template["spec"]["subdomain"]
    (container,) = template["spec"]["containers"]
    env = {entry["name"]: entry.get("value") or secrets.token_urlsafe(32) for entry in container["env"]}
    assert env["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    command = [word.replace("/app", str(program.parent)) for word in container["command"] + container["args"]]
    with Lab(hosts=job["spec"]["completions"]) as lab:
        env |= ENV | {"MASTER_ADDR": lab.address(0), "PATH": PATH}
        pods = [lab.start_on(i, command, env=env | {"JOB_COMPLETION_INDEX": str(i)}) for i in range(lab.hosts)]
        _expect_ranks(lab.hosts, pods)
