"""For mkdocstrings: literal blocks and tables of two columns, which docstrings have in reStructuredText, as Markdown."""

import re
from typing import Any

import griffe

_TABLE = re.compile(r"^(=+)  =+\n(.*?)^=+  =+$", re.MULTILINE | re.DOTALL)


def _markdown(match: re.Match[str]) -> str:
    wide = len(match[1])
    cells = [(line[:wide].strip(), line[wide:].strip().replace("|", "\\|")) for line in match[2].splitlines()]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in cells)])


class PlainRst(griffe.Extension):
    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            text = _TABLE.sub(_markdown, obj.docstring.value)
            obj.docstring.value = re.sub(r"^::$|(?<=\w):(?=:$)|(?<=\)):(?=:$)", "", text, flags=re.MULTILINE)
