"""A router between a host and its link, which translates the host's address: it dials others, and nobody dials it."""

from __future__ import annotations

from linklab.tools import call, ip, nft

NETWORKS = "192.168.0.0/16"  # of all hosts behind routers: addresses that lead nowhere from outside
_RULES = (
    "add table ip router",
    "add chain ip router out { type nat hook postrouting priority 100 ; }",
    'add rule ip router out oifname "{outside}" masquerade',
    "add chain ip router through { type filter hook forward priority 0 ; policy drop ; }",
    "add rule ip router through ct state established,related accept",
    'add rule ip router through iifname "lan" accept',
    # As home routers do: who dials the router itself hears nothing.
    "add chain ip router in { type filter hook input priority 0 ; policy drop ; }",
    "add rule ip router in ct state established,related accept",
    'add rule ip router in iifname "lan" accept',
)


def make(router: str, inside: str, host: int, *, outside: str) -> None:
    """Makes a host's namespace, `inside`, behind `router`, the one that has its link as the device `outside`. The host's device
    eth0 has the address 192.168.N.2, N its number + 1.
    """
    network = f"192.168.{host + 1}"
    ip("netns", "add", inside)
    ip("link", "add", "lan", "type", "veth", "peer", "name", "eth0", "netns", inside, inside=router)
    for namespace, device, last in ((router, "lan", 1), (inside, "eth0", 2)):
        ip("link", "set", device, "addrgenmode", "none", "up", inside=namespace)
        ip("address", "add", f"{network}.{last}/24", "dev", device, inside=namespace)
    ip("link", "set", "lo", "up", inside=inside)
    ip("route", "add", "default", "via", f"{network}.1", inside=inside)
    call(["ip", "netns", "exec", router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"])
    nft("; ".join(_RULES).replace("{outside}", outside), inside=router)
