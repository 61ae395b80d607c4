"""The fault matrix: every op, exact and compressed, with every fault, before, during and after a rank's part.

`cases.py` says which rows there are, what each must show, and why some cannot exist; `ops.py` how an op is issued and what
it must give; `rank.py` what a rank does in a row; `tap.py` stands between a rank and its peers and spoils its frames;
`run.py` runs a row in real processes, on loopback or in a lab whose links it cuts; `judge.py` says whether it holds.
"""
