"""Machines that come and go: which ones are alive, and groups of these machines.

members = lc.Membership(dist.TCPStore(host, port, is_master=False), "office-a")
opt = lc.DiLoCoX(inner, sync_every=100, group=members)
"""

from torch_lowcomm.membership.machine_group import MachineGroup
from torch_lowcomm.membership.membership import Membership

__all__ = ["MachineGroup", "Membership"]
