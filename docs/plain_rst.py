"""A griffe extension for mkdocstrings. It turns the reStructuredText of docstrings (literal blocks, tables of two columns) into
Markdown, and gives attributes and arguments that share a line a line each."""

import re
from typing import Any

import griffe

_TABLE = re.compile(r"^(=+)  =+\n(.*?)^=+  =+$", re.MULTILINE | re.DOTALL)
_INDEXED = re.compile(r"(?<!`)(\[\w+\]\[\w+\])(?!`)")  # [step][rank], which Markdown takes for a link
_SHARED = re.compile(r"^( +)(\w+(?:, \w+)+): ", re.MULTILINE)


def _apart(match: re.Match[str]) -> str:
    *others, last = match[2].split(", ")
    return "".join(f"{match[1]}{name}: see ``{last}``.\n" for name in others) + f"{match[1]}{last}: "


def _markdown(match: re.Match[str]) -> str:
    wide = len(match[1])
    cells = [(line[:wide].strip(), line[wide:].strip().replace("|", "\\|")) for line in match[2].splitlines()]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in cells)])


class PlainRst(griffe.Extension):
    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            if "Attributes:" in obj.docstring.value or "Args:" in obj.docstring.value:
                obj.docstring.value = _SHARED.sub(_apart, obj.docstring.value)
            text = _INDEXED.sub(r"``\1``", _TABLE.sub(_markdown, obj.docstring.value))
            obj.docstring.value = re.sub(r"^::$|(?<=\w):(?=:$)|(?<=\)):(?=:$)", "", text, flags=re.MULTILINE)
