"""Functions of torch.distributed whose names have changed, by their newest names."""

import torch.distributed as dist

# Before torch 2.13 they are all_gather_into_tensor and reduce_scatter_tensor; torch 2.13 warns of these names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
