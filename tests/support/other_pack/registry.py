"""The nodes of this pack by their ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

NODE_CLASS_MAPPINGS: dict[str, type] = {}


def node(name: str, returns: str | tuple[str, ...], **inputs: Any) -> Callable[[Function], Function]:
    """Return a decorator that makes a function a node of this pack.

    Args:
        name: the node's id.
        returns: the type of the function's result, or the types of the results in its tuple.
        inputs: the type of each argument, or the list of its choices.
    """
    required = {"required": {argument: (kind,) for argument, kind in inputs.items()}}

    def register(function: Function) -> Function:
        def run(**given: Any) -> tuple[Any, ...]:
            result = function(**given)
            return (result,) if isinstance(returns, str) else result

        NODE_CLASS_MAPPINGS[name] = type(
            name,
            (),
            {
                "INPUT_TYPES": classmethod(lambda _: required),
                "RETURN_TYPES": (returns,) if isinstance(returns, str) else returns,
                "FUNCTION": "run",
                "run": staticmethod(run),
            },
        )
        return function

    return register
