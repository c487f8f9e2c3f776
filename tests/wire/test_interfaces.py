"""Network interfaces are looked for as gloo and NCCL look for them."""

from __future__ import annotations

import re
import socket
import string

import pytest

from parallel_backend.errors import Refused
from parallel_backend.wire.address import GLOO, NCCL, check_interfaces


def interfaces() -> list[str]:
    """Those that are there now: tests of several machines make others and remove them."""
    return [name for _, name in socket.if_nameindex()]


ALL = ",".join(string.ascii_letters)
"""What every name begins with."""


@pytest.mark.parametrize("names", ["lo", ",".join(interfaces()), "", "x"])
def test_what_gloo_finds(names: str) -> None:
    check_interfaces({GLOO: names}, nccl=True)


@pytest.mark.parametrize("names", ["lo", "l", "=lo", "^none", "^=l", "none,lo", "=lo:0", ""])
def test_what_nccl_finds(names: str) -> None:
    check_interfaces({NCCL: names}, nccl=True)


@pytest.mark.parametrize(
    ("variable", "names"),
    [(GLOO, "none0"), (GLOO, "lo,none0"), (NCCL, "none"), (NCCL, "=l"), (NCCL, f"^{ALL}")],
)
def test_what_is_not_there_is_refused_with_what_is(variable: str, names: str) -> None:
    before = interfaces()
    with pytest.raises(Refused) as raised:
        check_interfaces({variable: names}, nccl=True)
    said = re.match(rf"{variable} is '(.*)' and this machine's network interfaces are (.*?): ", str(raised.value))
    assert said is not None
    assert said[1] == names
    assert said[2].split(", ") in (before, interfaces())


def test_nccl_is_not_asked_where_it_is_not_used() -> None:
    check_interfaces({NCCL: "none"}, nccl=False)
