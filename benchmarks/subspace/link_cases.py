"""The cases that are timed on slow links: the messages of subspace pipelines, and the sizes of their decoders."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Case:
    """One way of a step's messages, under GPipe.

    Attributes:
        name: In a row.
        kind: "whole": all numbers of a free decoder; "constrained": the coefficients of `rank` dimensions.
        rank: Of the subspace.
        coefficients: As `lc.subspace.cut`.
        generates: Turns of generation; 0: it does not generate. One is enough where a turn takes minutes.
    """

    name: str
    kind: str
    rank: int = 0
    coefficients: str = "fp32"
    generates: int = 0
    ours = True
    order = schedule = "GPipe"
    ahead = 0


@dataclasses.dataclass(frozen=True)
class Setting:
    """One pipeline with what is timed of it, on a link that is known later.

    Attributes:
        stages: Of a block each, one a host.
        shape: Of a micro-batch: sequences, tokens.
        cases: Of the messages.
        token_s: Seconds a token of a block's forward and backward, which waits; None: a GPT's block computes.
        width: Of the residual stream.
        repetitions: Turns of every case.
        generate: Prompts, tokens of each, and tokens that are generated behind them; None: no generation.
        rate: Of the link: "200mbit"; "unshaped".
    """

    stages: int
    shape: tuple[int, int]
    cases: tuple[Case, ...]
    token_s: tuple[float, float] | None
    width: int = 1024
    repetitions: int = 5
    generate: tuple[int, int, int] | None = None
    rate: str = "unshaped"

    @property
    def name(self) -> str:
        """In a row: stages and blocks."""
        return f"{self.stages} stages, blocks {'compute' if self.token_s is None else 'wait'}"

    @property
    def link(self) -> str:
        """In a row."""
        return f"{self.rate} 0ms"

    @property
    def burst(self) -> int | None:
        """Of the shapers: a part of a message that is few frames."""
        return None if self.rate == "unshaped" else 4 << 10

    def job(self) -> dict[str, object]:
        """The job of link_rank.py."""
        context = max(self.shape[1], sum(self.generate[1:]) + 1 if self.generate else 0)
        names = ("shape", "token_s", "width", "repetitions", "generate")
        return {
            **{name: getattr(self, name) for name in names},
            "cases": [dataclasses.asdict(case) for case in self.cases],
            "context": context,
        }
