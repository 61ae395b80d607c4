"""Small decoders and batches, for the tests of lc.subspace."""

import sys
from pathlib import Path

import torch
from torch import nn

import torch_lowcomm as lc
from torch_lowcomm.subspace.families import new_cache

sys.path += [str(Path(__file__).parents[3] / folder) for folder in ("benchmarks", "examples")]  # of a pool's ranks

from convergence.subspace.rounded import Whole
from model import GPT, VOCABULARY, Config

WIDTH, RANK, LAYERS, BATCH, TIME = 32, 8, 4, 3, 10
WHOLE = Whole(WIDTH)  # a boundary of decoders whose weights stay free
FAMILIES = ("Llama", "Qwen2", "Qwen3", "Olmo")


def gpt(dtype=torch.float64, layers=LAYERS, seed=0):
    torch.manual_seed(seed)
    return GPT(Config(width=WIDTH, layers=layers, heads=4, context=48)).to(dtype)


def constrained(dtype=torch.float64, **options):
    return lc.subspace.constrain(gpt(dtype), RANK, **options)


def family(name, dtype=torch.float64, **options):
    """A tiny model of `transformers`, built from a config."""
    import transformers

    sizes = {
        "vocab_size": 96,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(sizes | options))
    return getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)


def ids(vocabulary=VOCABULARY, batch=BATCH, time=TIME, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (batch, time), generator=generator)


def chain(stages, ids):
    """What the last stage returns, all of them in one process."""
    x = ids
    for stage in stages:
        x = stage(x, ids=ids)
    return x


def cuts(model, count, **options):
    return [lc.subspace.cut(model, index, count, **options) for index in range(count)]


class Positions(nn.Module):
    """A decoder with a frozen additive table of positions: a buffer, or a module."""

    def __init__(self, kind="buffer", rows=48):
        super().__init__()
        whole = gpt()
        self.embed, self.blocks, self.norm, self.head = whole.embed, whole.blocks, whole.norm, whole.head
        rows = torch.randn(rows, WIDTH, dtype=torch.float64)
        if kind == "buffer":
            self.register_buffer("positions", rows)
        else:
            self.positions = nn.Embedding(len(rows), WIDTH, _weight=rows, _freeze=True)
        self.table = lambda: rows

    def forward(self, tokens):
        x = self.embed(tokens) + self.table()[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def logits(model, ids):
    """Of a GPT, a decoder with positions, or a model of `transformers`, in one piece."""
    if hasattr(model, "config"):
        return model(input_ids=ids, use_cache=False).logits
    if isinstance(model, Positions):
        return model(ids)
    x = model.embed(ids)
    for block in model.blocks:
        x = block(x)
    return model.head(model.norm(x))


@torch.no_grad()
def by_hand(model, ids, new, temperature=0.0, seed=0):
    """The whole decoder on all positions for each token: no cache, no cut."""
    draws = torch.Generator().manual_seed(seed)
    for _ in range(new):
        last = logits(model, ids)[:, -1]
        chosen = last.argmax(-1, keepdim=True)
        if temperature:
            chosen = torch.multinomial(torch.softmax(last / temperature, -1), 1, generator=draws)
        ids = torch.cat((ids, chosen), dim=1)
    return ids


def expect_cached(stages, ids, whole, times):
    """Stages that keep keys and values give the whole's outputs, part by part of so many positions."""
    caches, start = [new_cache(stage.subspace_parts, stage) for stage in stages], 0
    for time in times:
        part = x = ids[:, start : start + time]
        for stage, cache in zip(stages, caches, strict=True):
            x = stage(x, ids=part, start=start, cache=cache)
        assert apart(x, whole[:, start : start + time]) < 1e-12
        start += time


def gradients(model):
    """Each parameter's gradient, those of constrained weights as their parts in the subspace."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter.grad.clone()
        parameter.grad = None
    for name, module in model.named_modules():
        basis = getattr(module, "subspace_basis", None)
        role = getattr(module, "subspace_role", None)
        if role == "embedding":
            found[f"{name}.weight"] = basis.project(found[f"{name}.weight"])
        elif role is not None:
            found[f"{name}.weight"] = basis.project_weight(found[f"{name}.weight"])
    return found


def loss(logits, target):
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def expect_uncut(model, stages, ids, bound=1e-12):
    """The stages have the loss and the gradients of the model in one piece."""
    target = ids.roll(1, 1)
    of_one, of_stages = loss(logits(model, ids), target), loss(chain(stages, ids), target)
    assert abs(of_stages.item() - of_one.item()) < bound
    of_one.backward()
    expected = gradients(model)
    of_stages.backward()
    for name, gradient in gradients(model).items():
        assert apart(gradient, expected[name]) < bound, name


def apart(x, y):
    """‖x − y‖ / ‖y‖."""
    x, y = x.detach().double(), y.detach().double()
    return float((x - y).norm() / y.norm())
