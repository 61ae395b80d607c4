"""Families of decoders whose parts are found by themselves, and how the blocks of each are called."""

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torch_lowcomm.subspace.parts import REQUIRED, Parts, linears, part_at

TRANSFORMERS = Parts(
    embedding="model.embed_tokens",
    blocks="model.layers",
    attention_output="self_attn.o_proj",
    feed_forward_down="mlp.down_proj",
    norm="model.norm",
    head="lm_head",
    rotary="model.rotary_emb",
    family="transformers",
)
# The names that decoders written by hand give their parts; the first that is there is taken.
_PLAIN = {
    "embedding": ("embed", "embedding", "tok_embeddings", "token_embedding", "wte", "transformer.wte", "embed_tokens"),
    "blocks": ("blocks", "layers", "h", "transformer.h"),
    "attention_output": ("attention.out", "attention.wo", "attn.c_proj", "attn.out", "attn.proj", "self_attn.o_proj"),
    "feed_forward_down": ("down", "mlp.down", "feed_forward.w2", "mlp.c_proj", "mlp.down_proj", "ffn.down"),
    "norm": ("norm", "ln_f", "final_norm", "transformer.ln_f"),
    "head": ("head", "lm_head", "output"),
    "positions": ("positions", "wpe", "transformer.wpe", "position_embedding", "pos_embed"),
}
NAMES = (*REQUIRED, "positions", "rotary")


def parts_of(decoder: nn.Module, **names: str | None) -> Parts:
    """The parts of a decoder.

    Known are the causal models of `transformers` that are built as Llama's, Qwen2's, Qwen3's and OLMo's are, and plain decoders
    whose parts have usual names (`embed`, `blocks`, `attention.out`, `down`, `norm`, `head` and others). `names` are the paths of
    parts that are not found or not the right ones, as the attributes of `Parts`. Raises ValueError for a part that is not found,
    with what the decoder has.
    """
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        raise TypeError(f"parts: expected names among {', '.join(NAMES)}, got {', '.join(unknown)}")
    given = {role: path for role, path in names.items() if path is not None}
    if is_transformers(decoder) and part_at(decoder, TRANSFORMERS.blocks) is not None:
        parts = dataclasses.replace(TRANSFORMERS, **given)
    else:
        parts = Parts(**_plain(decoder, given))
    parts.expect(decoder)
    return parts


def is_transformers(decoder: nn.Module) -> bool:
    """Whether a model is one of the package `transformers`."""
    return hasattr(getattr(decoder, "config", None), "model_type")


def _plain(decoder: nn.Module, given: dict[str, str]) -> dict[str, str]:
    found = dict(given)

    def find(roles: Sequence[str], root: nn.Module) -> None:
        for role in roles:
            for path in _PLAIN[role]:
                if role not in found and part_at(root, path) is not None:
                    found[role] = path

    find(("embedding", "blocks", "norm", "head", "positions"), decoder)
    blocks = part_at(decoder, found.get("blocks", "-"))
    first = next(iter(blocks.children()), None) if isinstance(blocks, nn.Module) else None
    if first is not None:
        find(("attention_output", "feed_forward_down"), first)
    missing = [role for role in REQUIRED if role not in found]
    if missing:
        names = ", ".join(f"{role}=" for role in missing)
        children = ", ".join(name for name, _ in decoder.named_children()) or "no parts"
        block = f"; a block has {linears(first)}" if first is not None else ""
        raise ValueError(
            f"{type(decoder).__name__}: {', '.join(missing)} not found; name them by {names}. Found: "
            f"{', '.join(f'{role}={path!r}' for role, path in found.items()) or 'nothing'}. The decoder has {children}{block}"
        )
    return found


class KeyValues:
    """The keys and values that the attention of one block remembers while it generates.

    A block takes it as `forward(x, cache=, start=)`: `start` positions came before x's first, and attention goes over

        k, v = cache.append(k, v)

    so that query i of x sees the keys 0...start + i.
    """

    def __init__(self) -> None:
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds those of new positions; returns those of all, [batch, heads, positions, head width]."""
        if self._keys is not None and self._values is not None:
            keys = torch.cat((self._keys, keys), dim=2)
            values = torch.cat((self._values, values), dim=2)
        self._keys, self._values = keys, values
        return keys, values


def new_cache(parts: Parts, root: nn.Module) -> Any:
    """An empty cache of keys and values for the blocks of a decoder or a stage, which `run_blocks` takes."""
    if parts.family == "transformers":
        from transformers import DynamicCache

        return DynamicCache()  # without a config every layer keeps all positions: masks tell sliding windows
    for number, block in parts.blocks_of(root):
        takes = inspect.signature(block.forward).parameters
        if not {"cache", "start"} <= set(takes):
            raise TypeError(
                f"{parts.blocks}.{number}: expected {type(block).__name__}.forward(x, cache=, start=) to generate with, got "
                f"forward({', '.join(takes)})"
            )
    return {number: KeyValues() for number, _ in parts.blocks_of(root)}


def run_blocks(
    parts: Parts,
    root: nn.Module,
    x: torch.Tensor,
    *,
    start: int = 0,
    cache: Any = None,
    only: Sequence[int] | None = None,
) -> torch.Tensor:
    """Runs the blocks of a decoder or a stage on x, [batch, time, width], one after the other; those whose numbers are in `only`.

    `start` positions come before x's first. `cache` has their keys and values, by `new_cache`, and gets those of x.
    """
    call = _transformers_call(parts, root, x, start, cache) if parts.family == "transformers" else None
    for number, block in parts.blocks_of(root):
        if only is not None and number not in only:
            continue
        if call is not None:
            y = block(x, **call(number))
            x = y[0] if isinstance(y, tuple) else y
        else:
            x = block(x) if cache is None else block(x, cache=cache[number], start=start)
    return x


def _transformers_call(parts: Parts, root: nn.Module, x: torch.Tensor, start: int, cache: Any) -> Any:
    """The arguments of each block, by its number: what the model's own forward gives its layers."""
    config: Any = root.config
    positions = torch.arange(start, start + x.shape[1], device=x.device).unsqueeze(0)
    rotary = None if parts.rotary is None else root.get_submodule(parts.rotary)(x, positions)
    types = getattr(config, "layer_types", None)
    kinds = getattr(config, "_attn_implementation", "eager")
    masks: dict[int | None, torch.Tensor | None] = {}

    def call(number: int) -> dict[str, Any]:
        sliding = types is not None and types[number] == "sliding_attention"
        window = (
            config.sliding_window if sliding or (types is None and getattr(config, "sliding_window", None)) else None
        )
        if window not in masks:
            masks[window] = _mask(x, start, window, kinds)
        return {
            "attention_mask": masks[window],
            "position_ids": positions,
            "past_key_values": cache,
            "use_cache": cache is not None,
            "position_embeddings": rotary,
        }

    return call


def _mask(x: torch.Tensor, start: int, window: int | None, implementation: str) -> torch.Tensor | None:
    """What is added to attention's scores, [1, 1, time, start + time]; None where the implementation is causal without."""
    time, end = x.shape[1], start + x.shape[1]
    whole = window is None or end <= window
    if whole and implementation != "eager" and (start == 0 or time == 1 or implementation.startswith("flash")):
        return None
    if implementation not in ("eager", "sdpa"):
        raise ValueError(f"attention implementation: expected 'sdpa' or 'eager' for a window, got {implementation!r}")
    queries = torch.arange(start, end, device=x.device).unsqueeze(1)
    keys = torch.arange(end, device=x.device).unsqueeze(0)
    seen = keys <= queries
    if window is not None:
        seen &= keys > queries - window
    mask = torch.zeros(time, end, dtype=x.dtype, device=x.device).masked_fill(~seen, torch.finfo(x.dtype).min)
    return mask[None, None]
