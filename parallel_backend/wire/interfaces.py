"""The network interfaces that an environment names for gloo and NCCL."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from ..errors import Refused

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
