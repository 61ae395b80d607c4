"""Constrains a decoder to a subspace, so that k numbers a token pass between its stages and nothing is lost on the way."""

import contextlib
import dataclasses
import inspect
import logging
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from torch_lowcomm._option_table import expect_integer
from torch_lowcomm.subspace.anchor import Anchor, Embedding
from torch_lowcomm.subspace.basis import Basis, without_autocast
from torch_lowcomm.subspace.check import check, structure
from torch_lowcomm.subspace.compare import Finding, distance
from torch_lowcomm.subspace.families import NAMES, parts_of
from torch_lowcomm.subspace.parts import Parts
from torch_lowcomm.subspace.stage import expect_free_blocks
from torch_lowcomm.subspace.weights import wide

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Report:
    """What `constrain` found and did; the model has it as `subspace_report`."""

    parts: Parts
    width: int  # d
    rank: int  # k
    blocks: int
    free_blocks: int  # of these, the last ones, which are not constrained
    sigma: float  # the size of the fixed part's elements
    lost: dict[str, float]  # by a constrained weight's name, the share of its norm that was outside the subspace
    untied: bool  # whether the head had the embedding's weight, and has its own now

    def __str__(self) -> str:
        parts = self.parts
        return (
            f"{self.blocks} blocks ({parts.blocks}, {parts.family}) of width {self.width}, rank {self.rank}: a token is "
            f"{self.rank} numbers between stages, {self.width / self.rank:.4g} times fewer; constrained are {parts.embedding}, "
            f"{parts.attention_output} and {parts.feed_forward_down}"
            f"{f' but of the last {self.free_blocks}' if self.free_blocks else ''}, fixed part of {self.sigma:g}"
            f"{', head untied' if self.untied else ''}"
        )


@without_autocast
def constrain(
    decoder: nn.Module,
    rank: int = 64,
    *,
    free_blocks: int = 1,
    seed: int = 0,
    fixed: str = "signs",
    sigma: float | None = None,
    pretrained: bool | None = None,
    project_pretrained: bool = False,
    allow_half: bool = False,
    **names: str | None,
) -> nn.Module:
    """Constrains a decoder, in place (sections 4.2 and 4.3 of Protocol Models).

    The rows of every W_p1 (attention output) and W_p2 (feed-forward down) are projected onto a subspace S of `rank` dimensions,
    which for an `nn.Linear` is W ← U(UᵀW); the embedding becomes a fixed part plus a trained part in S (`Embedding`); a head
    that is tied to the embedding gets its own weight. All of a residual stream but the embedding's fixed part then lies in S, up
    to the first of the last `free_blocks` blocks, which nothing is asked of: no boundary follows them (section 5.1 constrains
    "all but the final transformer layer"). `lc.SubspaceAdamW` keeps the weights there.

    The wire loses nothing; the constraint costs: there are fewer directions to write into.

    Args:
        decoder: A decoder of pre-norm blocks: written by hand, or Llama-, Qwen2-, Qwen3- or OLMo-like of `transformers`, built
            from a config. It is the same on all ranks.
        rank: k, 1...width.
        free_blocks: The number of blocks at the decoder's end whose weights stay free. `cut` needs the last boundary before them.
            0: all blocks are constrained.
        seed: Of the subspace and of the fixed part; the same on all ranks.
        fixed: "signs": the fixed part's elements are ±sigma, made where they are used. "gaussian": the paper's table.
        sigma: Their size. None: the root mean square of the embedding's weight, to two digits, which is not 0.
        pretrained: Whether the weights are trained. None: they are where a config of `transformers` names a checkpoint.
        project_pretrained: Constrains trained weights too, and logs how much of each is lost.
        allow_half: Constrains a decoder whose residual stream is in half precision, whose boundaries are then not exact.
        **names: The paths of parts that are not found, by the attributes of `Parts`: embedding, blocks, attention_output,
            feed_forward_down, norm, head, positions, rotary.

    Returns:
        The decoder, with `subspace_parts`, `subspace_basis` and `subspace_report`; the constrained modules have `subspace_role`
        and `subspace_basis`.

    Raises:
        TypeError: The rank, the number of free blocks or the seed is no integer.
        ValueError: A part is not found, the rank is none of 1...width, no block would be constrained, the weights are trained, or
            something would break exactness: everything that `check` finds is named. The decoder is as it was.
    """
    parts = parts_of(decoder, **names)
    if hasattr(decoder, "subspace_parts"):
        raise ValueError("constrain: expected a decoder that is not constrained, got one that is")
    table = decoder.get_submodule(parts.embedding).weight
    vocabulary, width = table.shape
    expect_integer("subspace: rank", rank)
    if not 1 <= rank <= width:
        raise ValueError(f"rank: expected one of 1...{width}, the width, got {rank}")
    expect_integer("subspace: free_blocks", free_blocks)
    total = len(parts.blocks_of(decoder))
    if not 0 <= free_blocks < total:
        raise ValueError(
            f"free_blocks: expected one of 0...{total - 1}, fewer than the decoder's blocks, got {free_blocks}: a boundary "
            f"needs a constrained block before it"
        )
    parts = dataclasses.replace(parts, free_from=total - free_blocks if free_blocks else None)
    trained = "pretrained=True" if pretrained else ""
    if pretrained is None and (name := getattr(getattr(decoder, "config", None), "_name_or_path", "")):
        trained = f"of {name}"  # the checkpoint that a model of `transformers` was loaded from
    if trained and not project_pretrained:
        raise ValueError(
            f"constrain: expected a decoder built from a config, got trained weights ({trained}), of which all that is outside "
            f"{rank} of {width} dimensions would be thrown away; project_pretrained=True does that"
        )
    basis = Basis(width, rank, seed=seed).to(table.device)
    basis.free_blocks = int(free_blocks)
    _refuse(structure(parts, decoder), allow_half=allow_half)

    if sigma is None:
        sigma = float(f"{float(table.detach().float().square().mean().sqrt()):.2g}")
        if sigma == 0:
            raise ValueError(
                f"sigma: expected a number where {parts.embedding}.weight is all zeros, got None: the fixed part would be too"
            )
    anchor = Anchor(vocabulary, width, seed=seed, sigma=sigma, fixed=fixed).to(table.device)
    untied = decoder.get_submodule(parts.head).weight is table
    with _undone(decoder, parts):
        lost = _replace_embedding(decoder, parts, basis, anchor) | _project(decoder, parts, basis)
        if hasattr(getattr(decoder, "config", None), "tie_word_embeddings"):
            decoder.config.tie_word_embeddings = False  # or the package ties them again when it saves
        decoder.add_module("subspace_basis", basis)
        decoder.add_module("subspace_anchor", anchor)
        report = Report(parts, width, rank, total, basis.free_blocks, sigma, lost, untied)
        decoder.subspace_parts, decoder.subspace_report = parts, report
        found = check(decoder)
        _refuse(found, allow_half=allow_half)
    decoder.register_load_state_dict_pre_hook(expect_free_blocks)
    logger.info("constrain: %s", report)
    for finding in found:
        logger.warning("constrain: not exact: %s", finding)
    for name, share in lost.items():
        logger.log(logging.WARNING if trained else logging.DEBUG, "constrain: %s loses %.3g of its norm", name, share)
    return decoder


# For help(): the paths of parts by name.
_own, _keyword = inspect.signature(constrain), inspect.Parameter.KEYWORD_ONLY
_paths = [inspect.Parameter(name, _keyword, default=None, annotation="str | None") for name in NAMES]
constrain.__signature__ = _own.replace(parameters=[*list(_own.parameters.values())[:-1], *_paths])  # type: ignore[attr-defined]


@contextlib.contextmanager
def _undone(decoder: nn.Module, parts: Parts) -> Iterator[None]:
    """Makes a decoder as it was where the block raises."""
    path, _, name = parts.embedding.rpartition(".")
    embedding, config = decoder.get_submodule(parts.embedding), getattr(decoder, "config", None)
    tied = getattr(config, "tie_word_embeddings", None)
    projections = [module for _, _, module in parts.projections(decoder)]
    kept = [(p, p.data) for m in projections for p in (m.weight, m.bias) if p is not None]
    try:
        yield
    except BaseException:
        setattr(decoder.get_submodule(path), name, embedding)
        for p, data in kept:
            p.data = data
        for module, names in [
            *((m, ("subspace_role", "subspace_basis")) for m in projections),
            (decoder, ("subspace_parts", "subspace_report", "subspace_basis", "subspace_anchor")),
        ]:
            for attribute in names:
                if hasattr(module, attribute):
                    delattr(module, attribute)
        if tied is not None:
            config.tie_word_embeddings = tied
        raise


def _refuse(findings: Sequence[Finding], *, allow_half: bool) -> None:
    others = [finding for finding in findings if not finding.half or not allow_half]
    if others:
        raise ValueError(
            "constrain: the boundaries would not be exact:\n" + "\n".join(f"  {finding}" for finding in others)
        )


def _replace_embedding(decoder: nn.Module, parts: Parts, basis: Basis, anchor: Anchor) -> dict[str, float]:
    """Puts an `Embedding` in the place of the decoder's, with the old one's weight projected for T_S."""
    path, _, name = parts.embedding.rpartition(".")
    replaced = decoder.get_submodule(parts.embedding)
    old = replaced.weight
    new = Embedding(old.shape[0], basis, anchor, padding_idx=getattr(replaced, "padding_idx", None))
    share = distance(basis, old)
    new.weight = nn.Parameter(_projected(basis, old, weight=False), requires_grad=old.requires_grad)
    setattr(decoder.get_submodule(path), name, new)
    return {f"{parts.embedding}.weight": share}


def _project(decoder: nn.Module, parts: Parts, basis: Basis) -> dict[str, float]:
    lost = {}
    for name, role, module in parts.projections(decoder):
        lost[f"{name}.weight"] = distance(basis, module.weight, weight=True)
        module.weight.data = _projected(basis, module.weight, weight=True)
        if module.bias is not None:  # frozen, or it would have been refused
            module.bias.data = _projected(basis, module.bias, weight=False)
        module.subspace_role = role
        object.__setattr__(module, "subspace_basis", basis)  # the model's own, which is no part of this module
    return lost


def _projected(basis: Basis, x: torch.Tensor, *, weight: bool) -> torch.Tensor:
    """A tensor projected in at least single precision, in its own type."""
    with torch.no_grad():
        projected = basis.project_weight if weight else basis.project
        return projected(wide(x.detach())).to(x.dtype)
