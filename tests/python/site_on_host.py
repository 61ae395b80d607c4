"""A rank of site_phases on a host of a lab: python site_on_host.py FOLDER RANK SIZE STORE_HOST PORT HOW STAY OP..."""

import pickle
import signal
import sys

from ranks.child import Rank
from site_phases import lose_sites

if __name__ == "__main__":
    folder, rank, size, store_host, port, how, stay, *ops = sys.argv[1:]
    options = {"mode": "continue", "timeout_s": 6.0, "store_host": store_host}
    here = Rank(int(rank), int(size), folder)
    found = lose_sites(here, int(port), how, int(stay), signal.SIGSTOP, ops, options, cut=True)
    here.path(f"found{rank}").write_bytes(pickle.dumps(found))
