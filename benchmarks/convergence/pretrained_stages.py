"""One rank of `pretrained.py` whose model is cut into stages: fine-tunes windows of text that come back.

`python -m convergence.pretrained_stages JOB.json` is the same on a host of a lab.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from typing import Any

import data
import torch
import torch.distributed as dist
from linklab.job import job_of_host
from measure import sent_in_messages
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B
from torch.nn import functional

import torch_lowcomm as lc
from convergence.pretrained_rank import Configuration

MICRO_BATCHES = 4
SAMPLES = 16  # windows, all of which an epoch visits


class Part(nn.Module):
    """Layers of a causal language model of transformers, of one stage of some: the first has the embedding, the last the head.

    Where the model's head is its embedding the two are weights of their own from here on.
    """

    def __init__(self, model: Any, index: int, count: int) -> None:
        super().__init__()
        layers = list(model.model.layers)
        begin, end = (place * len(layers) // count for place in (index, index + 1))
        self.layers = nn.ModuleList(layers[begin:end])
        self.rotary = model.model.rotary_emb
        self.embed = model.model.embed_tokens if index == 0 else None
        self.norm, self.head = (model.model.norm, model.lm_head) if index == count - 1 else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [windows, context] or activations [windows, context, width] → activations or logits."""
        if self.embed is not None:
            x = self.embed(x)
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        angles = self.rotary(x, positions)
        for layer in self.layers:
            out = layer(x, attention_mask=None, position_ids=positions, position_embeddings=angles)
            x = out[0] if isinstance(out, tuple) else out
        return x if self.head is None else self.head(self.norm(x))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy, nats a token."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def train(rank: int, init_method: str, *, configuration: Configuration, model: str, text: str) -> dict[str, Any]:
    """As `pretrained_rank.train`; `options` are those of lc.pipeline.Stage, and `cache`. Losses are those of the last stage."""
    c = configuration
    dist.init_process_group("lowcomm", init_method=init_method, rank=rank, world_size=c.stages)
    torch.manual_seed(c.seed)
    corpus = data.Corpus(**torch.load(text, weights_only=True))
    options = dict(c.options)
    cache = lc.pipeline.Cache() if options.pop("cache", False) else None
    part = Part(torch.load(model, weights_only=False), rank, c.stages)
    stage = lc.pipeline.Stage(part, rank, c.stages, torch.device("cpu"), cache=cache, **options)
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(part.parameters(), lr=c.lr, fused=True)
    windows = list(zip(*corpus.batch(SAMPLES, c.context, seed=c.seed, step=0, rank=0), strict=True))
    batch = c.batch * MICRO_BATCHES
    run: dict[str, Any] = {"loss": [], "bytes": [], "seconds": [], "before": validation(schedule, corpus, c)}
    before, start = sent_in_messages(), time.monotonic()
    epochs = -(-c.steps * batch // SAMPLES)
    for step, (samples, x, y) in enumerate(lc.pipeline.batches(windows, batch=batch, seed=c.seed, epochs=epochs)):
        for group in optimizer.param_groups:
            group["lr"] = c.lr * min(1, (step + 1) / c.warm_up)
        losses: list[Tensor] = []
        named = {} if cache is None else {"samples": samples}
        lc.pipeline.step(schedule, x, target=y, losses=losses, **named)
        optimizer.step()
        optimizer.zero_grad()
        run["bytes"].append(sent_in_messages() - before)
        run["seconds"].append(time.monotonic() - start)
        run["loss"].append(_of_last(losses, c))
        if rank == 0:
            print(f"# stages step {step + 1}: loss {run['loss'][-1]:.4f}", file=sys.stderr, flush=True)
    run["after"] = validation(schedule, corpus, c)
    run["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    dist.destroy_process_group()
    return run


def validation(schedule: Schedule1F1B, corpus: data.Corpus, c: Configuration) -> float:
    """The mean loss over the windows of the validation text that all other runs take too, by exact messages. Collective."""
    batch, losses = c.batch * MICRO_BATCHES, list[Tensor]()
    turns = [corpus.validation_batch(c.batch, c.context, turn) for turn in range(c.windows // c.batch * c.ranks)]
    x, y = (torch.cat(of) for of in zip(*turns, strict=True))
    for tokens, targets in zip(x.split(batch), y.split(batch), strict=True):
        of_batch: list[Tensor] = []  # torch empties the list at each call
        lc.pipeline.evaluate(schedule, tokens, target=targets, losses=of_batch)
        losses += of_batch
    return _of_last(losses, c)


def _of_last(losses: list[Tensor], c: Configuration) -> float:
    """The last stage's mean, on all ranks."""
    mean = torch.stack(losses).mean().detach() if losses else torch.zeros(())
    dist.broadcast(mean, c.stages - 1)
    return float(mean)


def main() -> None:
    """Trains the job's stage."""
    job, finish = job_of_host()
    torch.set_num_threads(1)
    configuration = Configuration(**job.pop("configuration"))
    finish(train(int(os.environ["RANK"]), "env://", configuration=configuration, **job))


if __name__ == "__main__":
    main()
