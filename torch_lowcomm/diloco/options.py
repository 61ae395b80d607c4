"""The options of an outer loop: names, types, defaults and meanings in one table, and their checks as far as Python can."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, ClassVar

from torch_lowcomm._option_table import OptionTable, option
from torch_lowcomm.codec import codec as checked_codec

_RESIDUALS = ("float32", "int8")
_KINDS: dict[str, tuple[type, str]] = {"int": (Integral, "an integer"), "float": (Real, "a number")}  # by annotation


@dataclasses.dataclass(frozen=True)
class DiLoCoXOptions(OptionTable):
    """How an outer loop runs. `DiLoCoX` takes these fields as keyword arguments; all ranks give the same.

    Attributes:
        sync_every: H, inner steps from one outer step to the next; with `sync_seconds` the most.
        sync_seconds: In place of a count of steps: an interval ends after so many seconds, by the clock of each site's first
            rank. Sites of different speed then make different numbers of inner steps, and a site's part of an average is its
            samples (`step(samples=)`) over those of all sites. Train until `report["outer_steps"]`, which is the same at all
            sites, has come to a number.
        quorum: With a `Membership`: the number of sites that go on without late ones. A site that is late, however long,
            adds what it has trained to a later average, and does not hold the others up. A contribution's weight is c²/n, of
            c samples in n inner steps (Decoupled DiLoCo, arXiv 2604.21428). None: every outer step waits for all sites.
        grace_s: Seconds for which a quorum waits for the others nevertheless; None for a tenth of the time between two outer
            steps, at least one second.
        mode: "sync" waits for the average, as DiLoCo does. In the other modes the average takes a whole interval, and
            training goes on meanwhile from another point: "continue" from the outer parameters plus what this rank has
            trained since, "restart" from the outer parameters.
        outer_lr: γ.
        outer_momentum: μ; None for 0.9 with mode "sync" and 0.6 with others.
        sync_warmup: Number of first outer steps that wait as in mode "sync". DiLoCoX's paper gives no number; a tenth of all is
            our choice.
        codec: Codec text of the pseudo-gradients, e.g. "sym4:bucket=128", "gauss2"; None sends them in float32.
        rank: Rank r of the two factors that are sent in place of a matrix (PowerSGD, arXiv 1905.13727) and are coded by
            `codec`; None for no factors. A matrix [size(0), the rest] whose factors would not be smaller is coded as it is.
        projection_codec: Codec text of each first factor; None for `codec`.
        error_feedback: Whether what compression lost is added to the next pseudo-gradient, or a number in (0, 1], the share of
            it: SparseLoCo's β. None: with any codec except "gauss". A residual and its next value take 8 bytes an element.
        residual_dtype: "float32", or "int8" for residuals of 1 byte an element (sym8:bucket=512), 2 with their next value. What
            8 bits lose of a residual is lost.
        adapt_rank: Whether the rank r_t follows the effective rank of the averages (arXiv 2506.21263, section 2.4.3): the
            mean over the last five outer steps of the number of singular values that have 95 % of the squares' sum. It
            does not rise above the rank that is sent, since an average shows no more directions than its factors.
        adapt_sync_every: Whether the interval follows r_t too: H·r_t/r, at least H/4. Shards need `cluster`, or a `mesh` of
            two dimensions.
        min_rank: The least rank.
        fragments: Number of parts of the parameters. Each part has separate outer steps, spread evenly over the interval.
        fragment_sync_delay: Inner steps from a fragment's pseudo-gradient to its outer step; None for a whole interval (or
            0 with mode "sync").
        fragment_update_alpha: Mode "restart": the share of the rank's own parameters that remains after an outer step.
        average_buffers: Whether every outer step also averages the model's floating-point buffers, exactly.
        check_every: Outer steps between comparisons of a checksum of the outer parameters; 0 for never.
        seed: Seed of the first factors and of codecs that round at random.
    """

    owner: ClassVar[str] = "DiLoCoX"
    arguments: ClassVar[tuple[str, ...]] = ("model", "group", "cluster", "mesh", "replicas", "resume")
    symbols: ClassVar[Mapping[str, str]] = {
        "H": "sync_every",
        "lr": "outer_lr",
        "momentum": "outer_momentum",
        "r": "rank",
    }

    sync_every: int | None
    sync_seconds: float | None = option(None, "a number above 0, or None", lambda s: 0 < s < float("inf"))
    quorum: int | None = option(None, "1 or more, or None", lambda machines: machines >= 1)
    grace_s: float | None = option(None, "a number of 0 or more, or None", lambda s: 0 <= s < float("inf"))
    mode: str = "continue"
    outer_lr: float = 0.7
    outer_momentum: float | None = None
    sync_warmup: int = 0
    codec: str | None = "sym4:bucket=128"
    rank: int | None = option(None, "1 or more, or None for no factors", lambda rank: rank >= 1)
    projection_codec: str | None = None
    error_feedback: float | bool | None = option(None, "a bool, or in (0, 1]", lambda e: e is False or 0 < e <= 1)
    residual_dtype: str = option("float32", f"one of {_RESIDUALS}", _RESIDUALS.__contains__)
    adapt_rank: bool = False
    adapt_sync_every: bool = False
    min_rank: int = 1
    fragments: int = 1
    fragment_sync_delay: int | None = option(
        None, "1 or more, or None (mode='sync' applies at once)", lambda steps: steps >= 1
    )
    fragment_update_alpha: float = 0.0
    average_buffers: bool = False
    check_every: int = 10
    seed: int = option(0, "0 or more", lambda seed: seed >= 0)

    def for_core(self) -> dict[str, Any]:
        """Returns these options as `_C.DiLoCoX` takes them, after checks of what that class does not check: types, and codecs.

        The message of an error has the option's name, what was expected, and the value.
        """
        self._check_types()
        self.expect_in_range()
        if self.grace_s is not None and self.quorum is None:
            raise ValueError(
                f"DiLoCoX: grace_s: expected quorum too, the sites that wait so long, got {self.grace_s:g}"
            )
        given = {name: value for name, value in vars(self).items() if value is not None}
        for name in ("average_buffers", "residual_dtype", "grace_s"):
            given.pop(name, None)
        for name in ("codec", "projection_codec"):
            given[name] = checked_codec(given[name]).spec if name in given else "none"
        if self.error_feedback is None:
            given["error_feedback"] = given["codec"] != "none" and not given["codec"].startswith("gauss")
        return {
            "outer_momentum": 0.9 if self.mode == "sync" else 0.6,
            "eight_bits": self.residual_dtype == "int8",
            **given,
        }

    def _check_types(self) -> None:
        if self.sync_every is None:  # DiLoCoX takes it without a default, too, so that the other ranks hear of it
            if self.sync_seconds is None:
                raise TypeError("DiLoCoX: sync_every: expected an integer, got none")
            raise ValueError(
                "DiLoCoX: sync_seconds: expected sync_every too, the most inner steps of an interval, got none"
            )
        for field in dataclasses.fields(self):
            value, (kind, *others) = getattr(self, field.name), str(field.type).split(" | ")
            if kind not in _KINDS or (value is None and others):
                continue
            expected, words = _KINDS[kind]
            if not isinstance(value, expected) or (isinstance(value, bool) and "bool" not in others):
                raise TypeError(f"DiLoCoX: {field.name}: expected {words}, got {value!r}")
        if not isinstance(self.mode, str):
            raise TypeError(f"DiLoCoX: mode: expected sync, continue or restart, got {self.mode!r}")
        for name in ("codec", "projection_codec"):
            if not isinstance(getattr(self, name), str | None):
                raise TypeError(f"DiLoCoX: {name}: expected a codec's text, got {getattr(self, name)!r}")
