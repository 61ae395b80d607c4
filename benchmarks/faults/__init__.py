"""The fault matrix: every op, exact and compressed, with every fault, before, during and after a rank's part.

`cases.py` says which rows exist, and why some cannot; `ops.py` how an op is issued and what it must give. `rank.py` is
what a rank does in every row; `signals.py`, `cuts.py` and `differences.py` are the faults. `run.py` runs a row in real
processes, on loopback or in a lab. `judge.py` says from the ranks' facts whether the row holds. `rows.py` is the program
around any such matrix. Frames that are spoilt on their way have tests of their own (`tests/python/wire`, and C++).
"""
