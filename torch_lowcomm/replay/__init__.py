"""Fine-tuning that sends a byte a gradient (Zelikman et al., Just One Byte (per Gradient), 2023).

opt = lc.SeedReplay(model, lr=1e-2, samples=4, group=dist.group.WORLD)
loss = opt.step(lambda sample: loss_of(model, batches[sample]))
"""

from torch_lowcomm.replay.exchange import Alone, Exchange, StaticExchange
from torch_lowcomm.replay.optimizer import SeedReplay
from torch_lowcomm.replay.parameters import machine_number

__all__ = ["Alone", "Exchange", "SeedReplay", "StaticExchange", "machine_number"]
