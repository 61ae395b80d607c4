"""The names of a decoder's parts, by which it is constrained, checked and cut."""

import dataclasses
from collections.abc import Iterator

import torch
from torch import nn

ATTENTION_OUTPUT, FEED_FORWARD_DOWN, EMBEDDING = "attention_output", "feed_forward_down", "embedding"
REQUIRED = ("embedding", "blocks", "attention_output", "feed_forward_down", "norm", "head")


@dataclasses.dataclass(frozen=True)
class Parts:
    """Where the parts of a decoder are: x = embedding(ids) [+ positions]; x = block(x) ...; logits = head(norm(x)).

    Each is the path of a submodule, as `nn.Module.get_submodule` takes it; those of a block's parts begin at the block.

    Attributes:
        embedding: Token ids to [batch, time, width].
        blocks: An `nn.ModuleList`; in a stage an `nn.ModuleDict` whose keys are the blocks' numbers.
        attention_output: In a block: the `nn.Linear` whose output attention adds to the residual stream (W_p1 of the paper).
        feed_forward_down: In a block: the `nn.Linear` whose output the feed-forward layer adds (W_p2).
        norm: The norm behind the last block.
        head: Width to logits.
        positions: A frozen table [context, width] that is added to the embedding: a tensor, or a module with a `weight`. None
            where positions never enter the residual stream, as with rotary ones.
        rotary: A module that makes (cosine, sine) for all blocks, as in `transformers`. None where each block has its own.
        family: How a block is called: "plain" (`block(x)`) or "transformers".
        free_from: The number of the first block whose weights are free, as those of all blocks behind it are; None: of no block.
    """

    embedding: str
    blocks: str
    attention_output: str
    feed_forward_down: str
    norm: str
    head: str
    positions: str | None = None
    rotary: str | None = None
    family: str = "plain"
    free_from: int | None = None

    def is_free(self, number: int) -> bool:
        """Whether the weights of a block of this number are not constrained."""
        return self.free_from is not None and number >= self.free_from

    def blocks_of(self, root: nn.Module) -> list[tuple[int, nn.Module]]:
        """The blocks of a decoder or of a stage, each with its number in the whole decoder; one module may come twice."""
        blocks = root.get_submodule(self.blocks)._modules.items()
        return [(int(number), block) for number, block in blocks if block is not None]

    def place_of(self, name: str) -> str | None:
        """The block ("blocks.3"), embedding, table of positions, norm or head that a parameter of this name is in."""
        if name.startswith(f"{self.blocks}."):
            return f"{self.blocks}.{name[len(self.blocks) + 1 :].partition('.')[0]}"
        others = (self.embedding, self.positions, self.norm, self.head)
        return next((path for path in others if path is not None and f"{name}.".startswith(f"{path}.")), None)

    def projections(self, root: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
        """(name, role, module) of the attention outputs and feed-forward downs of constrained blocks, block by block."""
        for number, block in self.blocks_of(root):
            if self.is_free(number):
                continue
            for role in (ATTENTION_OUTPUT, FEED_FORWARD_DOWN):
                path = getattr(self, role)
                yield f"{self.blocks}.{number}.{path}", role, block.get_submodule(path)

    def embedding_of(self, root: nn.Module) -> nn.Module | None:
        """The embedding; None on stages that have none."""
        found = part_at(root, self.embedding)
        return found if isinstance(found, nn.Module) else None

    def is_whole(self, root: nn.Module) -> bool:
        """Whether a module of these parts is a decoder, and not a stage."""
        return all(part_at(root, path) is not None for path in (self.embedding, self.norm, self.head))

    def table(self, root: nn.Module) -> torch.Tensor | None:
        """The table of positions, [context, width]; None without one, and on stages that do not add it."""
        found = None if self.positions is None else part_at(root, self.positions)
        return found.weight if isinstance(found, nn.Module) else found

    def expect(self, root: nn.Module) -> None:
        """Refuses a decoder that has not all these parts, or others than an `nn.Linear` of the embedding's width as
        projections.
        """
        for role in ("embedding", "blocks", "norm", "head", "positions", "rotary"):
            path = getattr(self, role)
            if path is not None and part_at(root, path) is None:
                raise ValueError(f"{role}={path!r}: the decoder has no such part; it has {_children(root)}")
        blocks = self.blocks_of(root)
        if not blocks:
            raise ValueError(f"blocks={self.blocks!r}: expected one block or more, got none")
        width = root.get_submodule(self.embedding).weight.shape[1]
        for number, block in blocks:
            for role in (ATTENTION_OUTPUT, FEED_FORWARD_DOWN):
                path = getattr(self, role)
                found, name = part_at(block, path), f"{self.blocks}.{number}.{path}"
                if found is None:
                    raise ValueError(f"{role}={path!r}: block {number} has no such part; it has {linears(block)}")
                if not isinstance(found, nn.Linear):
                    raise ValueError(f"{role}: expected {name} to be an nn.Linear, got {type(found).__name__}")
                if found.out_features != width:
                    raise ValueError(
                        f"{role}: expected {name} to have the embedding's {width} outputs, got {found.out_features}"
                    )
        table = self.table(root)
        if table is not None and (table.dim() != 2 or table.shape[1] != width):
            raise ValueError(f"positions: expected a table [context, {width}], got {list(table.shape)}")


def linears(block: nn.Module) -> str:
    """The linear maps of a block as a text: names and shapes."""
    found = [
        f"{name} ({m.in_features} to {m.out_features})" for name, m in block.named_modules() if isinstance(m, nn.Linear)
    ]
    return ", ".join(found) or "no nn.Linear"


def _children(root: nn.Module) -> str:
    """The names of two levels of a module's children as a text."""
    found = []
    for name, child in root.named_children():
        nested = [] if isinstance(child, nn.ModuleList) else [f"{name}.{under}" for under, _ in child.named_children()]
        found += [name, *nested[:8]]
    return ", ".join(found) or "no parts"


def part_at(root: nn.Module, path: str) -> nn.Module | torch.Tensor | None:
    """What is at a path, a module or a tensor; None where nothing is."""
    found: object = root
    for name in path.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, nn.Module | torch.Tensor) else None
