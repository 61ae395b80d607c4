"""The runs of `convergence aq` by name: exact messages, codes without a memory (DirectQ), AQ-SGD and its variants.

Names are codec of activations / codec of gradients. All but "by channel" have the codec's own buckets. What follows a comma is
the setting: the run with exact messages in that setting is "exact, setting", or "exact" where there is none.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from convergence.pipeline.rank import Configuration


def coded(forward: str, backward: str, **others: Any) -> dict[str, Any]:
    """The options of a stage. Scales of channels tie tokens together, which has to be asked for."""
    unit = {"unit": "message"} if "axis=channel" in forward else {}
    return {"codecs": {"forward": forward, "backward": backward, **unit, **others}}


def aq(forward: str, backward: str, *, store: str = "fp16", **others: Any) -> Configuration:
    """AQ-SGD, whose first visits are in 8 bits unless `others` say otherwise."""
    return Configuration(**coded(forward, backward, **others), store=store)


BY_CHANNEL = ("sym2:axis=channel", "sym8:axis=channel")
GAUSS = ("gauss2", "gauss4")
# The runs of the gates.
CLAIMS = {
    "exact": Configuration(),
    "DirectQ sym2/sym8": Configuration(**coded(*BY_CHANNEL)),
    "AQ sym2/sym8": aq(*BY_CHANNEL, first_visit=None),
    "DirectQ gauss2/gauss4": Configuration(**coded(*GAUSS)),
    "AQ gauss2/gauss4": aq(*GAUSS),
    "AQ gauss1/gauss4": aq("gauss1", "gauss4"),
    "AQ gauss2/gauss4, m in 8 bits": aq(*GAUSS, store="sym8:bucket=128"),
    "AQ gauss2/gauss4, m in 2 bits": aq(*GAUSS, store="sym2:bucket=128"),
}
# What README's and the pages' rows of pipelines are from: validation by exact messages, of samples that come back, and of text
# whose every window is seen once, by a model from its first weights.
WAYS = {
    "exact": Configuration(),
    "DirectQ gauss4/gauss4": Configuration(**coded("gauss4", "gauss4")),
    "DirectQ minmax4/minmax4": Configuration(**coded("minmax4:bucket=128", "minmax4:bucket=128")),
    "DirectQ gauss2/gauss4": Configuration(**coded(*GAUSS)),
    "AQ gauss2/gauss4": aq(*GAUSS),
    "AQ gauss4/gauss4": aq("gauss4", "gauss4"),
}
FINE_TUNING = {
    f"{name}, fine-tuning, {stages} stages": dataclasses.replace(c, stages=stages, samples=1024)
    for stages in (2, 4)
    for name, c in WAYS.items()
    if "minmax4" not in name
}
FRESH = {
    f"{name}, fresh, {stages} stages": dataclasses.replace(
        c, stages=stages, pretrain=0, lr=1e-3, samples=16 * 600, epochs=1, point=60
    )
    for stages in (2, 4)
    for name, c in WAYS.items()
    if not c.store and name != "DirectQ gauss2/gauss4"
}
# A width that no power of two from 128 on divides, SmolLM2's: fresh text, and what README's line of pipelines is for, samples
# that come back.
_WIDE = Configuration(stages=2, pretrain=0, lr=6e-4, samples=16 * 300, epochs=1, point=30, width=576)
WIDE = {
    f"{name}, {setting}": dataclasses.replace(_WIDE, codecs=WAYS[name].codecs, store=WAYS[name].store, **others)
    for setting, names, others in (
        ("width 576", ("exact", "DirectQ gauss4/gauss4", "DirectQ minmax4/minmax4"), {}),
        ("width 576, again", ("exact", "AQ gauss2/gauss4"), {"samples": 16 * 60, "epochs": 5}),
    )
    for name in names
}
QUICK = ("exact", "DirectQ gauss2/gauss4", "AQ gauss2/gauss4")


def shortened(configuration: Configuration) -> Configuration:
    """For --quick: two stages, a quarter of the samples, few epochs; of fresh text a third of the steps."""
    c = dataclasses.replace(configuration, stages=2, validation=32, watched=16)
    if c.epochs == 1:
        return dataclasses.replace(c, samples=c.samples // 3, point=c.point // 3, validation=256)
    return dataclasses.replace(c, pretrain=min(c.pretrain, 40), samples=64, epochs=4)
