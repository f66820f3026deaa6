"""Network namespaces of this machine, one for each process, whose links to each other have a limited rate.

Each namespace has one end of a veth pair; the other ends hang on a bridge in a namespace of its own. A token bucket
filter limits both directions. Only root may do this, and only with iproute2.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from types import TracebackType

INTERFACE = "eth0"  # inside a namespace
ADDRESS = "10.213.0.{}"
BURST_SECONDS, LEAST_BURST = 0.001, 16 * 1024  # what a bucket lets pass at once: little beside any message
QUEUE_SECONDS = 0.5  # what waits longer is dropped


class LinksUnavailable(Exception):
    """Links cannot be limited here; the message says why."""


def check() -> None:
    """Raise ``LinksUnavailable`` without root or without iproute2."""
    if os.geteuid() != 0:
        raise LinksUnavailable("network namespaces need root")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise LinksUnavailable(f"{tool} is missing: install iproute2")
    probe = subprocess.run(["ip", "netns", "add", _name("probe")], capture_output=True, text=True)
    if probe.returncode != 0:
        raise LinksUnavailable(f"this machine makes no network namespace: {probe.stderr.strip()}")
    _call("ip", "netns", "delete", _name("probe"))


class Links:
    """So many namespaces while this is entered.

    Args:
        rates: Mbit/s of each namespace's link, in both directions; None: no limit.
    """

    def __init__(self, rates: Sequence[float | None]):
        self._rates = rates
        self._names = [_name(str(place)) for place in range(len(rates))]
        self._bridge = _name("bridge")

    def __enter__(self) -> "Links":
        check()
        try:
            for name in (self._bridge, *self._names):
                _call("ip", "netns", "add", name)
                _inside(name, "ip", "link", "set", "lo", "up")
            _inside(self._bridge, "ip", "link", "add", "bridge", "type", "bridge")
            _inside(self._bridge, "ip", "link", "set", "bridge", "up")
            for place, (name, rate) in enumerate(zip(self._names, self._rates, strict=True)):
                port = f"port{place}"
                _inside(self._bridge, "ip", "link", "add", port, "type", "veth", "peer", INTERFACE, "netns", name)
                _inside(self._bridge, "ip", "link", "set", port, "master", "bridge", "up")
                _inside(name, "ip", "address", "add", f"{self.address(place)}/24", "dev", INTERFACE)
                _inside(name, "ip", "link", "set", INTERFACE, "up")
                self.limit(place, rate)
        except BaseException:
            self._delete()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._delete()

    def address(self, place: int) -> str:
        """Of a namespace."""
        return ADDRESS.format(place + 1)

    def limit(self, place: int, rate: float | None) -> None:
        """Give a namespace's link this rate, in both directions, from now on."""
        for name, interface in ((self._names[place], INTERFACE), (self._bridge, f"port{place}")):
            if rate is None:
                # fails where there is no limit
                subprocess.run(
                    ["ip", "netns", "exec", name, "tc", "qdisc", "delete", "dev", interface, "root"],
                    capture_output=True,
                )
                continue
            burst = max(LEAST_BURST, round(rate * 1e6 / 8 * BURST_SECONDS))
            limits = ("rate", f"{rate}mbit", "burst", str(burst), "latency", f"{QUEUE_SECONDS * 1e3:g}ms")
            _inside(name, "tc", "qdisc", "replace", "dev", interface, "root", "tbf", *limits)

    def command(self, place: int, command: Sequence[str]) -> list[str]:
        """The command, to be run in a namespace."""
        return ["ip", "netns", "exec", self._names[place], *command]

    def sent(self, place: int) -> int:
        """Bytes that a namespace has sent so far, with all headers."""
        counter = f"/sys/class/net/{INTERFACE}/statistics/tx_bytes"
        return int(_inside(self._names[place], "cat", counter))

    def _delete(self) -> None:
        for name in (*self._names, self._bridge):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _name(part: str) -> str:
    return f"edgc-{os.getpid()}-{part}"


def _inside(name: str, *command: str) -> str:
    return _call("ip", "netns", "exec", name, *command)


def _call(*command: str) -> str:
    """Raises ``LinksUnavailable`` with what the command says."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise LinksUnavailable(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
