"""The cost of lc.SeedReplay: seconds, memory, and quantized weights."""
