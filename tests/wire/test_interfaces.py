"""Network interfaces are looked up by the rules of gloo and NCCL."""

from __future__ import annotations

import re
import socket
import string

import pytest

from parallel_backend.errors import Refused
from parallel_backend.wire.address import GLOO, NCCL, check_interfaces


def interfaces() -> list[str]:
    """Return the current interfaces. Tests of several machines add and remove others."""
    return [name for _, name in socket.if_nameindex()]


ALL = ",".join(string.ascii_letters)
"""First letters of all possible names."""


@pytest.mark.parametrize(
    ("variable", "names"),
    [
        *((GLOO, names) for names in ("lo", ",".join(interfaces()), "", "x")),
        *((NCCL, names) for names in ("lo", "l", "=lo", "^none", "^=l", "none,lo", "=lo:0", "")),
    ],
)
def test_interfaces_that_gloo_or_nccl_finds_are_accepted(variable: str, names: str) -> None:
    check_interfaces({variable: names}, nccl=True)
    check_interfaces({variable: names, NCCL: "none"}, nccl=False)


@pytest.mark.parametrize(
    ("variable", "names"),
    [(GLOO, "none0"), (GLOO, "lo,none0"), (NCCL, "none"), (NCCL, "=l"), (NCCL, f"^{ALL}")],
)
def test_a_missing_interface_is_refused_with_the_existing_ones(variable: str, names: str) -> None:
    before = interfaces()
    with pytest.raises(Refused) as raised:
        check_interfaces({variable: names}, nccl=True)
    said = re.match(rf"{variable} is '(.*)' and this machine's network interfaces are (.*?): ", str(raised.value))
    assert said is not None
    assert said[1] == names
    assert said[2].split(", ") in (before, interfaces())
