"""FSDP2 with coded weights and gradients (QSDP, arXiv 2302.02390) against exact FSDP2."""
