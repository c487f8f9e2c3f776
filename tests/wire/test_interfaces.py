"""Network interfaces are looked for as gloo and NCCL look for them."""

from __future__ import annotations

import socket

import pytest

from parallel_backend.errors import Refused
from parallel_backend.wire.interfaces import GLOO, NCCL, check_interfaces

OURS = [name for _, name in socket.if_nameindex()]


@pytest.mark.parametrize("names", ["lo", ",".join(OURS), "", "x"])
def test_what_gloo_finds(names: str) -> None:
    check_interfaces({GLOO: names}, nccl=True)


@pytest.mark.parametrize("names", ["lo", "l", "=lo", "^none", "^=l", "none,lo", "=lo:0", ""])
def test_what_nccl_finds(names: str) -> None:
    check_interfaces({NCCL: names}, nccl=True)


@pytest.mark.parametrize(
    ("variable", "names"),
    [(GLOO, "none0"), (GLOO, "lo,none0"), (NCCL, "none"), (NCCL, "=l"), (NCCL, f"^{','.join(OURS)}")],
)
def test_what_is_not_there_is_refused_with_what_is(variable: str, names: str) -> None:
    with pytest.raises(Refused) as raised:
        check_interfaces({variable: names}, nccl=True)
    assert str(raised.value).startswith(
        f"{variable} is {names!r} and this machine's network interfaces are {', '.join(OURS)}: "
    )


def test_nccl_is_not_asked_where_it_is_not_used() -> None:
    check_interfaces({NCCL: "none"}, nccl=False)
