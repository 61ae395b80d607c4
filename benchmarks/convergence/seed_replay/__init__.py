"""lc.SeedReplay, next to methods that send tensors."""
