"""An extension of Griffe, which reads docstrings for the site: what a docstring says about parameters becomes a list."""

from __future__ import annotations

import re
from typing import Any

import griffe


class ParameterLists(griffe.Extension):  # type: ignore[misc]
    """Our docstrings say `name: what types cannot say` in running text; on a page each parameter has a line of its own."""

    def on_function(self, *, func: Any, **_: Any) -> None:
        """Rewrite the docstring of a function."""
        if func.docstring is None:
            return
        names = [parameter.name for parameter in func.parameters]
        func.docstring.value = with_list(func.docstring.value, names)


def with_list(docstring: str, parameters: list[str]) -> str:
    """The docstring with a line `- name: …` wherever a sentence begins with the name of a parameter and a colon."""
    if not parameters:
        return docstring
    beginning = r"(?:\n\s*|(?<=\.) )"
    name = "|".join(map(re.escape, parameters))
    return re.sub(rf"{beginning}({name}): ", r"\n\n- `\1`: ", docstring)
