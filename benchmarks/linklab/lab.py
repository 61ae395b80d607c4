"""The lab: hosts, their links, what runs on them, and its end, which leaves nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence

from linklab import namespaces, offload, router, tools
from linklab.errors import LabError, LabUnavailable
from linklab.forward import Forwarder
from linklab.jobs import Job, RankExit
from linklab.link import SEGMENT_FRAME, Link, burst_bytes, parse_delay, parse_loss, parse_rate
from linklab.namespaces import prefix
from linklab.tools import ip, tc

DEVICE = "eth0"  # what a host's one interface is called, on each
# Capacity of a queue before it drops, in time at its rate: as much as the routers of slow links have.
QUEUE = "50ms"
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that passed a host's interface, Ethernet headers included. A frame of several segments that the kernel has not
    cut yet counts its headers once, so that these are the payload and 0.1 to 5 % more.
    """

    sent: int
    received: int


class Lab:
    """Hosts joined by a switch in a namespace of its own; a context manager.

    Every host is 10.77.0.1 + its number, on its interface eth0. A host's traffic is shaped where it leaves the host,
    what it receives where it leaves the switch. Hosts know each other's addresses (no ARP), so that a cut is silence and
    not an error, as on a long way. Processes on them die with the thread that started it.

    Args:
        hosts: 2 to 8.
        rate: Of every host: "100mbit", "10mbit/20mbit" (sends/receives), "unshaped".
        rate_of: The same for single hosts.
        delay: Of every frame a host sends: "20ms". Two hosts' round trip takes twice as long.
        loss: Of the frames each host sends: "0.1%".
        burst: Bytes that each shaper lets through at once after a pause; None: burst_bytes() of its rate.
        congestion: How TCP finds a rate on all hosts, for example "reno"; None: as the machine does.
        behind_router: Hosts behind a router that translates their address (router.py), which no other host can dial.

    Raises:
        ValueError: An argument is wrong.
        LabUnavailable: On entering, one sentence: this machine or user cannot make a lab.
        LabError: On entering, a part of the kernel refused.
    """

    def __init__(
        self,
        *,
        hosts: int = 2,
        rate: str = "unshaped",
        rate_of: Mapping[int, str] | None = None,
        delay: str | None = None,
        loss: str | None = None,
        burst: int | None = None,
        congestion: str | None = None,
        behind_router: Collection[int] = (),
    ) -> None:
        if not 2 <= hosts <= 8:
            raise ValueError(f"hosts: expected 2 to 8, got {hosts}")
        rates = dict.fromkeys(range(hosts), rate) | dict(rate_of or {})
        if wrong := sorted(set(rates) - set(range(hosts))):
            raise ValueError(f"rate_of: expected hosts 0 to {hosts - 1}, got {wrong}")
        delay_s = parse_delay(delay) if delay else 0.0
        lost = parse_loss(loss) if loss else 0.0
        self.links = [Link(*parse_rate(rates[host]), delay_s, lost) for host in range(hosts)]
        if burst is not None and burst < SEGMENT_FRAME:
            raise ValueError(f"burst: expected {SEGMENT_FRAME} bytes (a frame) or more, got {burst}")
        if wrong := sorted(set(behind_router) - set(range(hosts))):
            raise ValueError(f"behind_router: expected hosts 0 to {hosts - 1}, got {wrong}")
        self._burst, self._congestion = burst, congestion
        self._behind_router = frozenset(behind_router)
        self._addresses = {host: self.address(host) for host in range(hosts)}
        self._jobs: list[Job] = []
        self._forwarder: Forwarder | None = None
        self._exit: contextlib.ExitStack | None = None

    # ---- making and ending ----

    def __enter__(self) -> Lab:
        tools.check(*(("nft",) if self._behind_router else ()))
        namespaces.remove_leftovers()
        self._prefix = prefix(next(_numbers))
        with contextlib.ExitStack() as stack:
            stack.enter_context(_terminated_as_exception())
            stack.callback(self._remove)
            self._make()
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._exit
        self._exit.close()

    def _make(self) -> None:
        try:
            ip("netns", "add", self.switch)
            ip("link", "add", "br0", "type", "bridge", "stp_state", "0", "forward_delay", "0", inside=self.switch)
        except LabError as error:
            raise LabUnavailable(f"this machine's kernel or user cannot make network namespaces: {error}") from None
        ip("link", "set", "br0", "addrgenmode", "none", "up", inside=self.switch)
        forwarded = [host for host, link in enumerate(self.links) if link.forwarded]
        for host, link in enumerate(self.links):
            self._make_host(host, link)
        for host in range(len(self.links)):
            if forwarded:  # frames as they are on a wire, for a forwarder that neither cuts nor completes them
                offload.turn_off(self._edge(host), DEVICE)
            self._tell_others(host)
            if self._behind_router:  # where their own addresses lead: nowhere, without a word
                ip("route", "replace", router.NETWORKS, "dev", DEVICE, inside=self._edge(host))
        if forwarded:
            self._forwarder = Forwarder(self.switch, {host: self.links[host] for host in forwarded})
        for host in range(len(self.links)):
            self.restore(host)

    def _make_host(self, host: int, link: Link) -> None:
        inside, wire = self._edge(host), f"wire{host}"
        ip("netns", "add", inside)
        ip("link", "add", wire, "type", "veth", "peer", "name", DEVICE, "netns", inside, inside=self.switch)
        ip("link", "set", wire, "addrgenmode", "none", "up", inside=self.switch)
        ip("link", "set", DEVICE, "address", _mac(host), "addrgenmode", "none", "up", inside=inside)
        ip("address", "add", f"{self.address(host)}/24", "dev", DEVICE, inside=inside)
        if self._congestion:
            way = ("10.77.0.0/24", "dev", DEVICE, "src", self.address(host), "congctl", self._congestion)
            ip("route", "replace", *way, inside=inside)
        ip("link", "set", "lo", "up", inside=inside)
        if link.forwarded:
            tap = self._port(host)
            ip("tuntap", "add", "dev", tap, "mode", "tap", inside=self.switch)
            ip("link", "set", tap, "addrgenmode", "none", "txqueuelen", "10000", "up", inside=self.switch)
        self._shape(DEVICE, link.up_bits, inside)
        self._shape(wire, link.down_bits, self.switch)
        if host in self._behind_router:
            router.make(inside, self.namespace(host), host, outside=DEVICE)

    def _tell_others(self, host: int) -> None:
        for other in range(len(self.links)):
            if other != host:
                words = (self._addresses[host], "lladdr", _mac(host), "dev", DEVICE, "nud", "permanent")
                ip("neigh", "replace", *words, inside=self._edge(other))

    def _shape(self, device: str, bits: float | None, inside: str) -> None:
        if bits is None:
            return
        burst = self._burst or burst_bytes(bits)
        words = ("rate", f"{bits:.0f}bit", "burst", str(burst), "latency", QUEUE)
        try:
            tc("qdisc", "add", "dev", device, "root", "tbf", *words, inside=inside)
        except LabError as error:
            raise LabUnavailable(f"this kernel cannot shape a link (it needs sch_tbf): {error}") from None

    def _remove(self) -> None:
        # A second Ctrl-C waits until this is done: it would leave behind what is left to remove.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self._end()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _end(self) -> None:
        for job in self._jobs:
            job.kill()
        if self._forwarder:
            self._forwarder.close()
        for name in namespaces.existing(self._prefix + "-"):
            namespaces.remove(name)

    # ---- names ----

    @property
    def hosts(self) -> int:
        """How many."""
        return len(self.links)

    @property
    def switch(self) -> str:
        """The namespace of the bridge."""
        return f"{self._prefix}-wire"

    def namespace(self, host: int) -> str:
        """A host's namespace. ValueError where there is no such host."""
        if not 0 <= host < len(self.links):
            raise ValueError(f"host: expected 0 to {len(self.links) - 1}, got {host}")
        return f"{self._prefix}-host{host}"

    def _edge(self, host: int) -> str:
        """Where a host's link ends: its own namespace, or that of its router."""
        return f"{self._prefix}-router{host}" if host in self._behind_router else self.namespace(host)

    @staticmethod
    def address(host: int) -> str:
        """A host's IPv4 address."""
        return f"10.77.0.{host + 1}"

    def _port(self, host: int) -> str:
        return f"tap{host}" if self.links[host].forwarded else f"wire{host}"

    # ---- what a test or benchmark does with it ----

    def start_on(self, host: int, command: Sequence[str], *, env: Mapping[str, str] | None = None) -> Job:
        """Starts one command on one host, its output kept; of `env` on top of this process's environment."""
        return self._start({host: dict(env or {})}, command, show=False)

    def start(self, command: Sequence[str], *, env: Mapping[str, str] | None = None, show: bool = False) -> Job:
        """Starts a rank on every host, with torchrun's environment and `env` on top; `show` leaves it our output."""
        return self._start(
            {host: self.environment(host) | dict(env or {}) for host in range(self.hosts)}, command, show=show
        )

    def _start(self, changes: dict[int, dict[str, str]], command: Sequence[str], *, show: bool) -> Job:
        job = Job()
        self._jobs.append(job)
        for host, changed in changes.items():
            job._add(self.namespace(host), command, os.environ | changed, show)
        return job

    def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        show: bool = False,
    ) -> list[RankExit]:
        """start() and wait(): how each rank ended. LabError when one has not ended after timeout_s."""
        return self.start(command, env=env, show=show).wait(timeout_s)

    def environment(self, host: int) -> dict[str, str]:
        """Returns the variables that torchrun sets for the one rank of a machine, and gloo's interface."""
        world = str(self.hosts)
        return {
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": "29500",
            "RANK": str(host),
            "WORLD_SIZE": world,
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": str(host),
            "GROUP_WORLD_SIZE": world,
            "GLOO_SOCKET_IFNAME": DEVICE,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }

    def cut(self, host: int) -> None:
        """Frames to and from a host vanish at the switch, without a word; what its own queue holds still arrives."""
        self.namespace(host)
        ip("link", "set", "dev", self._port(host), "nomaster", inside=self.switch)

    def restore(self, host: int) -> None:
        """The link works again."""
        self.namespace(host)
        ip("link", "set", "dev", self._port(host), "master", "br0", inside=self.switch)

    def move(self, host: int, address: str) -> None:
        """Gives a host, or its router, another address of 10.77.0.0/24: connections from and to the old one fall silent."""
        inside, before = self._edge(host), self._addresses[host]
        ip("address", "del", f"{before}/24", "dev", DEVICE, inside=inside)
        ip("address", "add", f"{address}/24", "dev", DEVICE, inside=inside)
        if self._behind_router:
            ip("route", "replace", router.NETWORKS, "dev", DEVICE, inside=inside)
        self._addresses[host] = address
        self._tell_others(host)

    def bytes(self, host: int) -> Traffic:
        """Returns the traffic of a host's interface since the lab was made."""
        counted = tools.counters(DEVICE, inside=self._edge(host))
        return Traffic(counted["tx"]["bytes"], counted["rx"]["bytes"])

    def forwarder_drops(self) -> int:
        """Frames that the forwarder lost against its orders, for want of time: above 0, do not trust what was measured."""
        return self._forwarder.drops() if self._forwarder else 0


def _mac(host: int) -> str:
    return f"02:77:00:00:00:{host + 1:02x}"


@contextlib.contextmanager
def _terminated_as_exception() -> Iterator[None]:
    """SIGTERM ends the `with` block as Ctrl-C does, where nobody else handles it: else the lab would be left behind."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    def terminate(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    if ours:
        signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
