"""Machines that come and go: who is alive, and groups of those who are.

members = lc.Membership(dist.TCPStore(host, port, is_master=False), "office-a")
opt = lc.DiLoCoX(inner, sync_every=100, group=members)
"""

from torch_lowcomm.membership.membership import Formed, Membership

__all__ = ["Formed", "Membership"]
