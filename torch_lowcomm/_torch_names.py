"""Functions of torch.distributed whose names have changed, by their newest names."""

import torch.distributed as dist

# all_gather_into_tensor before torch 2.13, which warns of the old name.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
