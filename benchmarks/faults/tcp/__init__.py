"""Faults around a group: connections, addresses, processes, relays, routers, strangers and impostors.

`cases.py` says which rows there are and what each fault must come to. `rank.py` is what a rank does in every row, `acts.py`
what is done to it from outside, by the owner of the lab, `stage.py` how the two hear of each other. `outsiders.py` and
`crowd.py` are those who are no rank: they listen, replay, pretend and crowd. `run.py` runs a row in real processes on hosts of
linklab, `judge.py` says whether it holds, `cli.py` prints the table.
"""
