"""Addresses of worker groups on other machines."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import PlanRefused

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
