"""The fault matrix: every op, exact and compressed, with every fault, before, during and after a rank's part.

`cases.py` says which rows there are, and why some cannot exist; `ops.py` how an op is issued and what it must give;
`rank.py` what a rank does in every row, `signals.py`, `cuts.py`, `frames.py` and `differences.py` what it does for a
fault; `tap.py` stands between a rank and its peers and acts at one of its frames; `run.py` runs a row in real processes, on
loopback or in a lab; `judge.py` says from the facts (`facts.py`) whether it holds.
"""
