"""Addresses of worker groups on other machines."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import PlanRefused, Refused

SCHEME = "tcp://"


@dataclass(frozen=True)
class Address:
    """A host (a name or an IP address) and a TCP port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse `HOST:PORT`, with or without tcp:// in front. An IPv6 address is in brackets.

        Raises:
            PlanRefused: `text` is no address. A port without a host would mean all interfaces.
        """
        host, _, port = text.strip().removeprefix(SCHEME).rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        is_port = port.isdecimal() and len(port) <= len("65535") and 0 < int(port) < 65536
        if not host or any(c.isspace() or c in "/," for c in host) or not is_port:
            raise PlanRefused(
                f"{text!r} is no address: write {SCHEME}HOST:PORT, such as {SCHEME}10.0.0.1:29600, with the address of "
                "one network interface of the machine that rank 0 runs on."
            )
        return cls(host, int(port))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{SCHEME}{host}:{self.port}"


GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def check_interfaces(variables: Mapping[str, str], *, nccl: bool) -> None:
    """Check that gloo and, with `nccl`, NCCL will find the network interfaces that the environment names.

    Raises:
        Refused: a variable names no interface of this machine.
    """
    ours = [name for _, name in socket.if_nameindex()]
    missing_by_variable = {GLOO: _missing_to_gloo(variables.get(GLOO, ""), ours)}
    if nccl:
        missing_by_variable[NCCL] = _missing_to_nccl(variables.get(NCCL, ""), ours)
    for variable, missing in missing_by_variable.items():
        if missing:
            raise Refused(
                f"{variable} is {variables[variable]!r} and this machine's network interfaces are {', '.join(ours)}: unset "
                "it or name one of those, and start ComfyUI, or the workers on this machine, again."
            )


def _missing_to_gloo(names: str, ours: list[str]) -> bool:
    """Return True if one of the names is no interface. Torch ignores a variable of fewer than two characters."""
    return len(names) > 1 and not set(names.split(",")) <= set(ours)


def _missing_to_nccl(names: str, ours: list[str]) -> bool:
    """Return True if the names match no interface. Names are prefixes; after `=` exact names, after `^` exclusions."""
    excludes, names = names.startswith("^"), names.removeprefix("^")
    whole, names = names.startswith("="), names.removeprefix("=")
    listed = [name.partition(":")[0] for name in names.split(",") if name]

    def is_listed(interface: str) -> bool:
        return any(interface == name if whole else interface.startswith(name) for name in listed)

    return bool(listed) and all(is_listed(interface) == excludes for interface in ours)
