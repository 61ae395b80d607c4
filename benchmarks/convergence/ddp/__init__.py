"""The DDP hook against exact DDP and torch's PowerSGD hook."""
