"""README's recipes as a user runs them: torchrun, two ranks on the CPU, gradients coded, all ranks bit-identical."""

import pytest
import ranks
import recipes

POLICY = {"LOWCOMM_POLICY": "all_reduce=qsgd8:bucket=1024", "LOWCOMM_MIN_BYTES": "0"}

# The model that every recipe trains, and the line at its end.
_MODEL = """
import sys, zlib
import torch, torch.distributed as dist
import torch_lowcomm as lc
from torch import nn

torch.manual_seed(3)
net = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 8))
generator = torch.Generator().manual_seed(5)
data = [(torch.randn(32, generator=generator), torch.randint(0, 8, (), generator=generator)) for _ in range(256)]

def say(net):
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in net.parameters()))
    loss = nn.functional.cross_entropy(net(torch.stack([x for x, _ in data])), torch.stack([y for _, y in data]))
    group = dist.group.WORLD
    reduced = lc.stats(group)[group.group_name]["all_reduce"]
    with open(f"{sys.argv[1]}/said{dist.get_rank()}", "w") as f:
        f.write(f"{crc} {loss.item() < START} {reduced['calls'] - reduced['exact_calls'] >= 8} {reduced['ratio'] > 3}")

class Writer:
    logged = []

    def log(self, scalars, step):
        self.logged.append((step, scalars["lowcomm/sent_mb"]))

START = nn.functional.cross_entropy(net(torch.stack([x for x, _ in data])), torch.stack([y for _, y in data])).item()
"""

_DDP = """
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(data, 16, sampler=torch.utils.data.DistributedSampler(data))
for x, y in loader:
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
say(net)
dist.destroy_process_group()
"""

_ACCELERATE = """
from accelerate import Accelerator

dist.init_process_group("lowcomm")
accelerator = Accelerator(cpu=True)
loader = torch.utils.data.DataLoader(data, 16, shuffle=True)
model, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2), loader)
assert isinstance(model, nn.parallel.DistributedDataParallel)
for x, y in loader:
    accelerator.backward(nn.functional.cross_entropy(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
assert accelerator.gather(torch.ones(1)).tolist() == [1.0, 1.0]
say(net)
dist.destroy_process_group()
"""

_TRAINER = """
from transformers import Trainer, TrainerCallback, TrainingArguments

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net

    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

dist.init_process_group("lowcomm")
arguments = TrainingArguments(
    output_dir=sys.argv[1], use_cpu=True, max_steps=8, per_device_train_batch_size=16, learning_rate=1e-2,
    report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=4,
)

class Logs(TrainerCallback):
    def on_log(self, args, state, control, **kwargs):
        log(state.global_step)

log = lc.log_to(writer := Writer())
trainer = Trainer(Model(), arguments, train_dataset=[{"x": x, "labels": y} for x, y in data], callbacks=[Logs()])
trainer.train()
assert writer.logged[-1][0] == 8 and writer.logged[-1][1] > 0
assert isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel)
say(net)
dist.destroy_process_group()
"""

_LIGHTNING = """
import pytorch_lightning as pl
from pytorch_lightning.strategies import DDPStrategy

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

class Logs(pl.Callback):
    def on_train_batch_end(self, trainer, *args):
        log(trainer.global_step)

log = lc.log_to(writer := Writer())
trainer = pl.Trainer(
    callbacks=[Logs()],
    accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="lowcomm"), max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=sys.argv[1],
)
trainer.fit(Module(), torch.utils.data.DataLoader(data, 16))
assert [step for step, _ in writer.logged] == list(range(1, 9)) and writer.logged[-1][1] > 0
say(net)
"""

# The State is made before Lightning makes the group; there is no policy, so that what is coded is the hook's.
_LIGHTNING_HOOK = _LIGHTNING.replace(
    "import pytorch_lightning as pl\n",
    """import os
import pytorch_lightning as pl
del os.environ["LOWCOMM_POLICY"]
state = lc.ddp.State(codec="sym8:bucket=128")
""",
    1,
).replace(
    "    def configure_optimizers",
    """    def on_train_start(self):
        self.trainer.strategy.model.register_comm_hook(state, lc.ddp.hook)

    def configure_optimizers""",
    1,
)


def _recipe(tmp_path, body, *, run=()):
    script = tmp_path / "train.py"
    script.write_text(_MODEL + body)
    command = [*ranks.torchrun(2, "--standalone"), *run, script, tmp_path]
    ended = ranks.run_command(command, deadline_s=recipes.DEADLINE_S, cwd=tmp_path, env=recipes.QUIET | POLICY)
    assert ended.code == 0, ended.text
    said = [(tmp_path / f"said{rank}").read_text().split() for rank in range(2)]
    assert said[0] == said[1], "ranks end with different weights"
    assert said[0][1:] == ["True", "True", "True"], f"learned, coded, ratio: {said[0][1:]}"


@pytest.mark.slow
def test_a_stock_ddp_script(tmp_path):
    _recipe(tmp_path, _DDP, run=["-m", "torch_lowcomm", "run"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "body"),
    [
        ("accelerate", _ACCELERATE),
        ("transformers", _TRAINER),
        ("pytorch_lightning", _LIGHTNING),
        ("pytorch_lightning", _LIGHTNING_HOOK),
    ],
    ids=["Accelerate", "Hugging Face Trainer", "Lightning", "Lightning with the hook"],
)
def test_a_framework(tmp_path, package, body):
    recipes.needs(*([package, "accelerate"] if package == "transformers" else [package]))
    _recipe(tmp_path, body)


@pytest.mark.later
def test_a_tensor_travels_once_a_host(tmp_path):
    (ended,) = recipes.launch(tmp_path, "One copy a host for a tensor", [(4, {}, tmp_path)])
    said = recipes.output(tmp_path)
    assert ended.code == 0, said + recipes.output(tmp_path, "stderr")
    sums = [line.split("checksum ")[1] for line in said.splitlines() if "checksum " in line]
    assert len(sums) == 4 and len(set(sums)) == 1, said
