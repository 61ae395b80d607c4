"""Fine-tuning that sends a byte a gradient (Zelikman et al., Just One Byte (per Gradient), 2023).

opt = lc.SeedReplay(model, lr=1e-2, samples=4, group=dist.group.WORLD)
loss = opt.step(lambda sample: loss_of(model, batches[sample]))
"""

from torch_lowcomm.replay.exchange import Alone, Exchange, StaticExchange
from torch_lowcomm.replay.mismatch import ReplayMismatch
from torch_lowcomm.replay.optimizer import SeedReplay
from torch_lowcomm.replay.parameters import machine_number
from torch_lowcomm.replay.store_exchange import StoreExchange

__all__ = ["Alone", "Exchange", "ReplayMismatch", "SeedReplay", "StaticExchange", "StoreExchange", "machine_number"]
