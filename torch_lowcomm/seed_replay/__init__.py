"""Fine-tuning that sends a byte a gradient (Zelikman et al., Just One Byte (per Gradient), 2023).

opt = lc.SeedReplay(model, samples=4, group=dist.group.WORLD)
loss = opt.step(lambda sample: loss_of(model, batches[sample]))
"""

from torch_lowcomm.seed_replay.exchange import Alone, Exchange, ReplayMismatch, StaticExchange, machine_number
from torch_lowcomm.seed_replay.optimizer import SeedReplay
from torch_lowcomm.seed_replay.options import SeedReplayOptions
from torch_lowcomm.seed_replay.store import StoreExchange, StoreExchangeOptions

__all__ = [
    "Alone",
    "Exchange",
    "ReplayMismatch",
    "SeedReplay",
    "SeedReplayOptions",
    "StaticExchange",
    "StoreExchange",
    "StoreExchangeOptions",
    "machine_number",
]
