"""The store protocol (PROTOCOL.md): machines that come and go agree on every iteration's record, over a c10d store."""

from torch_lowcomm.seed_replay.store.exchange import StoreExchange
from torch_lowcomm.seed_replay.store.options import StoreExchangeOptions

__all__ = ["StoreExchange", "StoreExchangeOptions"]
