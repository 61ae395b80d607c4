"""Loss against bytes: a folder a method, `runs.py` with its configurations and gates and `rank.py` with one rank's part.

python benchmarks convergence fsdp|fsdp_variants|fsdp_tables|ddp|diloco|diloco_table1|aq|
    seed_replay|seed_replay_lora
"""
