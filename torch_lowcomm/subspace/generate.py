"""Generation over the stages that train: keys and values stay where they are made, coefficients go on, tokens come back."""

import contextlib
import re
import zlib
from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from torch_lowcomm._ddp_around import without_ddp
from torch_lowcomm._modes import evaluating
from torch_lowcomm.pipeline.edge import Edge
from torch_lowcomm.pipeline.stage import Stage
from torch_lowcomm.subspace.families import new_cache
from torch_lowcomm.subspace.stage import StageModule

_COEFFICIENTS, _TOKENS = 253, 254  # the channels of edges between stages, far from those that a user counts from 0


# The calls of each group, which all of its ranks make alike: a failure that a rank finds was in this call, or in one before.
_calls: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
_CALL = re.compile(r"generate, call (\d+): ")


@torch.no_grad()
def generate(
    stage: Stage | StageModule,
    ids: torch.Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Generates tokens behind prompts, called on all ranks of the pipeline with the same arguments.

    Each stage runs the prompts once and then one position a token, with the keys and values of its blocks before it. Receives
    are posted a token ahead: with one boundary a token costs one round trip. Tokens are those of the uncut decoder, as far as
    its arithmetic tells two tokens apart.

    Args:
        stage: The `lc.pipeline.Stage` of what `cut` made, or that module; stage i on rank i of the group. The only stage of one
            needs no group where it is the module.
        ids: The prompts, all of one length, an integer tensor [batch, time] where the stage computes.
        max_new_tokens: How many tokens are generated behind each prompt.
        temperature: 0: the token of the largest logit. Above: drawn from softmax(logits / temperature).
        seed: Of the draws, which the last stage makes.
        group: A group of backend lowcomm; None: that of the `lc.pipeline.Stage`, of a module the default group.

    Returns:
        [batch, time + max_new_tokens], on every rank.

    Raises:
        TypeError: A block does not take a cache, or an argument has another type.
        ValueError: Arguments are out of their ranges, the rank is not the stage's, or the stage before has other ones, another
            basis or another kind of boundary.
        torch.distributed.DistBackendError: Another stage has failed, by a mistake in its arguments too, or is gone, or the
            network. Where the group lives the next call begins anew.
    """
    if isinstance(stage, Stage):
        stage, group = without_ddp(stage.submod), stage.group if group is None else group
    _expect_place(stage, group)
    links = _Links(stage, group)
    with evaluating(stage), links.failing():
        links.begin()
        _expect(stage, ids, max_new_tokens, temperature, seed)
        links.of(ids, f"{max_new_tokens} {temperature} {seed}")
        draws = torch.Generator(device=ids.device).manual_seed(seed)
        done, now = 0, ids
        cache = new_cache(stage.subspace_parts, stage)
        links.post(ids.shape[1])
        for left in range(max_new_tokens, 0, -1):
            x = now if stage.is_first else links.coefficients()
            if left > 1:
                links.post(1)
            y = stage(x, ids=now, start=done, cache=cache, only_last=True)
            done += now.shape[1]
            if stage.is_last:
                now = _choose(y[:, -1], temperature, draws).to(ids.dtype)
                for end in links.ends:
                    end.send(now.int())
            else:
                now = links.tokens(y)
            ids = torch.cat((ids, now), dim=1)
        links.finish()
    return ids


def _expect_place(stage: StageModule, group: dist.ProcessGroup | None) -> None:

    if not isinstance(stage, StageModule):
        raise TypeError(
            f"stage: expected an lc.pipeline.Stage of what lc.subspace.cut returns, or that module, got {type(stage).__name__}"
        )
    if stage.count > 1 and (dist.get_rank(group), dist.get_world_size(group)) != (stage.index, stage.count):
        raise ValueError(
            f"group: expected {stage.count} ranks, of which this is {stage.index}, the stage's number, got rank "
            f"{dist.get_rank(group)} of {dist.get_world_size(group)}"
        )


def _expect(stage: StageModule, ids: torch.Tensor, new: int, temperature: float, seed: int) -> None:
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"{stage.name}: ids: expected a tensor, got {type(ids).__name__}")
    for name, number in (("max_new_tokens", new), ("seed", seed)):
        if not isinstance(number, int):
            raise TypeError(f"{stage.name}: {name}: expected an integer, got {number!r}")
    stage.expect_ids(ids)
    if ids.numel() == 0:
        raise ValueError(f"{stage.name}: ids: expected one token or more a prompt, got {list(ids.shape)}")
    if new < 1:
        raise ValueError(f"max_new_tokens: expected 1 or more, got {new}")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature: expected 0 or more, got {temperature}")
    places = stage.places
    if places is not None and ids.shape[1] + new - 1 > places:
        raise ValueError(
            f"{stage.name}: max_new_tokens: expected at most {places - ids.shape[1] + 1} behind prompts of {ids.shape[1]} tokens "
            f"with a table of {places} positions, got {new}"
        )


def _choose(logits: torch.Tensor, temperature: float, draws: torch.Generator) -> torch.Tensor:
    """One token a row, [batch, 1]."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    return torch.multinomial(torch.softmax(logits.double() / temperature, dim=-1), 1, generator=draws)


class _Links:
    """A stage's edges to the stages next to it, and between the last stage and each other one."""

    _ids: torch.Tensor
    _said: int  # what stages compare: 31 bits of basis and boundary, then 32 of prompts and options

    def __init__(self, stage: StageModule, group: dist.ProcessGroup | None) -> None:
        self._stage = stage
        last, codec = stage.count - 1, stage.message_codec
        self._call = 0
        if stage.count > 1 and (group := group or dist.group.WORLD) is not None:
            self._call = _calls[group] = _calls.get(group, 0) + 1
        self._purpose = f"generate, call {self._call}: "  # every failure of this call has it

        def edge(peer: int, channel: int, codec: str | None = None) -> Edge:
            return Edge(peer, channel, group=group, evaluate=codec, purpose=self._purpose)

        self._before = None if stage.is_first else edge(stage.index - 1, _COEFFICIENTS, codec)
        self._behind = None if stage.is_last else edge(stage.index + 1, _COEFFICIENTS, codec)
        self.ends = [edge(peer, _TOKENS) for peer in range(last)] if stage.is_last else [edge(last, _TOKENS)]

    def of(self, ids: torch.Tensor, options: str) -> None:
        """Takes the call's prompts, and a text of its options."""
        self._ids = ids
        prompts = zlib.crc32(options.encode(), zlib.crc32(ids.long().cpu().contiguous().numpy().tobytes()))
        context = self._stage.message_context()
        self._said = zlib.crc32(f"{context['basis']} {context['boundary']}".encode()) >> 1 << 32 | prompts

    def post(self, time: int) -> None:
        """Posts the receives of the next positions, `time` of them, and of the token behind them."""
        if self._before is not None:
            batch, kind = self._ids.shape[0], self._stage.coefficient_dtype
            like = torch.empty(batch, time, self._stage.rank, dtype=kind, device=self._ids.device)
            self._before.post([like, torch.empty(1, dtype=torch.int64)])
        if not self._stage.is_last:
            self.ends[0].post(torch.empty(self._ids.shape[0], 1, dtype=torch.int32, device=self._ids.device))

    def coefficients(self) -> torch.Tensor:
        """Those that the stage before has sent, if it has the same prompts, options, basis and boundary."""
        assert self._before is not None
        received, said = self._before.recv()
        (boundary, prompts), (own_boundary, own_prompts) = (divmod(x, 1 << 32) for x in (int(said), self._said))
        if prompts != own_prompts:
            raise ValueError(
                f"{self._stage.name}: ids: expected the prompts of the stage before, its max_new_tokens, temperature and seed "
                f"(crc {prompts:#010x}), got others (crc {own_prompts:#010x})"
            )
        if boundary != own_boundary:
            raise ValueError(
                f"{self._stage.name}: expected the basis, fixed part and kind of boundary of the stage before (crc "
                f"{boundary:#010x}), got others (crc {own_boundary:#010x})"
            )
        return received

    def tokens(self, coefficients: torch.Tensor) -> torch.Tensor:
        """Sends the next stage its coefficients; returns the tokens that the last stage then chooses, [batch, 1]."""
        assert self._behind is not None
        self._behind.send([coefficients, torch.tensor([self._said])])
        return self.ends[0].recv().to(self._ids.dtype)

    def begin(self) -> None:
        """Begins anew where an earlier call has failed; raises where another rank has already failed in this one."""
        for edge in self._all():
            if why := edge.failed:
                call = _CALL.search(why)  # the first one; causes of causes follow
                if call is not None and int(call[1]) == self._call:
                    raise RuntimeError(f"{self._stage.name}: {why}")
                edge.reset()

    def finish(self) -> None:
        """Waits until all that was sent is through."""
        for edge in self._all():
            edge.finish()

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Where this stage fails the others hear why, and fail in turn."""
        try:
            yield
        except BaseException as error:
            for edge in self._all():
                edge.fail(f"{self._purpose}{self._stage.name}: {type(error).__name__}: {error}")
            raise

    def _all(self) -> list[Edge]:
        return [edge for edge in (self._before, self._behind, *self.ends) if edge is not None]
