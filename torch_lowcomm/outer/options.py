"""Checks the options of an outer loop, as far as Python can."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from torch_lowcomm.codec import codec as checked_codec

_RESIDUALS = ("float32", "int8")
_INTEGERS = (
    "sync_every",
    "sync_warmup",
    "rank",
    "min_rank",
    "min_sync_every",
    "window",
    "fragments",
    "fragment_sync_delay",
    "check_every",
    "seed",
)
_OPTIONAL = (
    "codec",
    "projection_codec",
    "rank",
    "error_feedback",
    "outer_momentum",
    "rank_rule",
    "sync_rule",
    "fragment_sync_delay",
)
_NUMBERS = ("outer_lr", "outer_momentum", "energy", "fragment_update_alpha")


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns DiLoCoX's keyword arguments as `_C.DiLoCoX` takes them; that class checks ranges and combinations.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A codec or number is wrong. The message has the name, what was expected, and the value.
    """
    options = {name: value for name, value in given.items() if value is not None or name not in _OPTIONAL}
    for name in _INTEGERS:
        value = options.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"DiLoCoX: {name}: expected an integer, got {value!r}")
    for name in _NUMBERS:
        value = options.get(name, 0.0)
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"DiLoCoX: {name}: expected a number, got {value!r}")
    if not isinstance(options["mode"], str):
        raise TypeError(f"DiLoCoX: mode: expected sync, continue, restart or eager, got {options['mode']!r}")
    if options.get("rank", 1) < 1:
        raise ValueError(f"DiLoCoX: rank: expected 1 or more, or None for no factors, got {options['rank']!r}")
    if options.get("fragment_sync_delay", 1) < 1:
        raise ValueError(
            f"DiLoCoX: fragment_sync_delay: expected 1 or more, or None, got {options['fragment_sync_delay']!r}: "
            "mode='sync' applies at once"
        )
    if options["seed"] < 0:
        raise ValueError(f"DiLoCoX: seed: expected 0 or more, got {options['seed']!r}")
    residuals = options.pop("residual_dtype")
    if residuals not in _RESIDUALS:
        raise ValueError(f"DiLoCoX: residual_dtype: expected one of {_RESIDUALS}, got {residuals!r}")
    options["eight_bits"] = residuals == "int8"
    for name in ("codec", "projection_codec"):
        if not isinstance(options.get(name, ""), str):
            raise TypeError(f"DiLoCoX: {name}: expected a codec's text, got {options[name]!r}")
        options[name] = checked_codec(options[name]).spec if name in options else "none"
    coded = options["codec"] != "none"
    options["error_feedback"] = bool(options.get("error_feedback", coded and not options["codec"].startswith("gauss")))
    options.setdefault("outer_momentum", 0.9 if options["mode"] == "sync" else 0.6)
    adapts = options["adapt_sync_every"] or options["adapt_rank"]
    if options["adapt_sync_every"]:
        options["min_sync_every"] = max(options["min_sync_every"], options["fragments"])
    for name, of in (("rank_rule", adapts), ("sync_rule", options["adapt_sync_every"])):
        rule = options.get(name)
        if rule is not None and not callable(rule):
            raise TypeError(f"DiLoCoX: {name}: expected a function, got {type(rule).__name__}")
        if rule is not None and not of:
            raise ValueError(f"DiLoCoX: {name}: expected adaptive compression too, got none")
    return options
