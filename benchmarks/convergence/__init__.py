"""Loss against bytes: a folder a method, `runs.py` with its configurations and gates and `rank.py` with one rank's part."""
