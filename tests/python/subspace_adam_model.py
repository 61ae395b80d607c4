"""A small constrained decoder and a reference of SubspaceAdamW's formulas, which its tests share."""

import torch
from torch import nn
from torch.nn import functional

from torch_lowcomm.subspace.basis import Basis
from torch_lowcomm.subspace.weights import constrained_weights

WIDTH, RANK, HIDDEN, VOCABULARY = 24, 4, 40, 50


def vectors(width=WIDTH, rank=RANK, seed=0):
    """Uᵀ, [rank, width]."""
    return Basis(width, rank, seed=seed).vectors


class Block(nn.Module):
    """A residual block without attention."""

    def __init__(self, width, hidden):
        super().__init__()
        self.mix, self.out = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        x = x + self.out(torch.tanh(self.mix(x)))
        return x + self.down(torch.relu(self.up(x)))


class Embedding(nn.Module):
    """T_S."""

    def __init__(self, vocabulary, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocabulary, width) * 0.1)

    def forward(self, ids):
        return functional.embedding(ids, self.weight)


class Decoder(nn.Module):
    """Token ids [batch, time] to logits; its projections are constrained."""

    def __init__(self, basis, dtype=torch.float64, blocks=2, width=WIDTH, hidden=HIDDEN, vocabulary=VOCABULARY):
        super().__init__()
        self.embedding = Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary)
        self.to(dtype)
        mark(self.embedding, "embedding", basis)
        for block in self.blocks:
            mark(block.out, "attention_output", basis)
            mark(block.down, "feed_forward_down", basis)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mark(module, role, basis):
    """Constrains a module's weight."""
    object.__setattr__(module, "subspace_role", role)
    object.__setattr__(module, "subspace_basis", basis)
    with torch.no_grad():
        module.weight.copy_(projected(module.weight, basis.vectors, role == "embedding"))
        if getattr(module, "bias", None) is not None:
            module.bias.copy_(projected(module.bias, basis.vectors, False))


def projected(weight, of, rows):
    """U·UᵀW, or W·U·Uᵀ of rows; in float64."""
    weight = weight.double()
    return weight @ of.T @ of if rows else of.T @ (of @ weight)


def fresh(dtype=torch.float64, seed=7, **options):
    """The same decoder every time."""
    torch.manual_seed(seed)
    return Decoder(Basis(WIDTH, RANK), dtype, **options)


def backward(model, step, scaled=lambda loss: loss):
    """Adds the gradients of a batch that is the same in every run; the loss."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(VOCABULARY, (4, 8), generator=generator)
    logits = model(ids)
    loss = functional.cross_entropy(logits.flatten(0, 1).float().to(logits.dtype), (ids * 7 % VOCABULARY).flatten())
    scaled(loss).backward()
    return loss.item()


def project_gradients(model):
    """Projects the gradients of constrained weights onto S, in place; coordinates have no others."""
    for weight in constrained_weights(model):
        gradient = weight.parameter.grad
        if not weight.is_coordinates:
            gradient.copy_(projected(gradient, weight.basis.vectors, weight.role == "embedding"))


def train(model, optimizer, steps, clip=None):
    """Makes steps; their losses."""
    losses = []
    for step in steps:
        losses.append(backward(model, step))
        if clip is not None:
            optimizer.clip_grad_norm(clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def role_of(model, name):
    """The role of a parameter, "" of a plain one."""
    module = model.get_submodule(name.rpartition(".")[0])
    role = getattr(module, "subspace_role", "")
    return "bias" if role and name.endswith("bias") else role


class Reference:
    """The formulas of SubspaceAdamW's docstring, one after the other, in the model's dtype."""

    def __init__(self, model, of, lr, betas, eps, weight_decay, variant):
        self.model, self.of, self.variant = model, of, variant
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.steps, self.state = 0, {}

    @torch.no_grad()
    def step(self, clip=None):
        (b1, b2), u = self.betas, self.of.T
        self.steps += 1
        named = dict(self.model.named_parameters())
        gradients = {}
        for name, p in named.items():
            role = role_of(self.model, name)
            gradients[name] = projected(p.grad, self.of, role == "embedding").to(p.dtype) if role else p.grad.clone()
        norm = sum(g.square().sum() for g in gradients.values()).sqrt().item()
        for name, p in named.items():
            role, g = role_of(self.model, name), gradients[name]
            if clip is not None:
                g = g * min(1.0, clip / (norm + 1e-6))
            rows = role == "feed_forward_down" and self.variant == "rows"
            m, v = self.state.setdefault(name, (torch.zeros_like(g), torch.zeros_like(g[0] if rows else g)))
            m.mul_(b1).add_((1 - b1) * g)
            v.mul_(b2).add_((1 - b2) * (g.square().mean(0) if rows else g.square()))
            update = (m / (1 - b1**self.steps)) / ((v / (1 - b2**self.steps)).sqrt() + self.eps)
            if role and not rows:
                update = update @ u @ u.T if role == "embedding" else u @ (u.T @ update)
            p.mul_(1 - self.lr * self.weight_decay).sub_(self.lr * update)
        return norm
