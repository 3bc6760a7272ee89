"""Tools of `/v1/responses` as functions of the chat API, which has no groups of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lade.server.responses.schemas import Tool

_BETWEEN = "__"


class Tools:
    """What a request offers: functions, alone or in namespaces.

    A model sees the functions of a namespace under both names, `namespace__name`; its client is told them apart again.

    Args:
        given: as they stand in the request.

    Attributes:
        functions: as the chat API has them.
        dropped: the types of the others, which are not served, in their order.
    """

    def __init__(self, given: Sequence[Tool] | None) -> None:
        self.functions: list[dict[str, Any]] = []
        self.dropped: list[str] = []
        self._places: dict[str, dict[str, str]] = {}
        for tool in given or ():
            if tool.type == "namespace":
                for each in tool.tools or ():
                    self._add(each, tool.name)
            else:
                self._add(tool, None)

    def told(self, name: str) -> dict[str, str]:
        """The members of an item that name the function which a model calls so."""
        return self._places.get(name, {"name": name})

    def _add(self, tool: Tool, namespace: str | None) -> None:
        if tool.type != "function":
            self.dropped.append(tool.type)
            return
        name = flat_name(tool.name, namespace)
        fields = {"name": name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
        given = {field: value for field, value in fields.items() if value is not None}
        self.functions.append({"type": "function", "function": given})
        if namespace and name and tool.name:
            self._places[name] = {"namespace": namespace, "name": tool.name}


def flat_name(name: str | None, namespace: str | None) -> str | None:
    """What a model calls a function of a namespace; the name itself outside of any."""
    if not namespace or name is None:
        return name
    return f"{namespace.removesuffix(_BETWEEN)}{_BETWEEN}{name}"
