"""Shared by all commands: output as text or JSON, argument types, tables, and user errors. It needs no torch."""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

DECIMAL = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BINARY = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class UserError(ValueError):
    """An error that the user can fix, in one sentence; exit code 2."""


class Parser(argparse.ArgumentParser):
    """A parser that reports an error in one sentence, without the usage."""

    def error(self, message: str) -> Any:
        raise UserError(f"{message}; see {self.prog} --help")


def size(text: str) -> int:
    """Bytes from ``123``, ``2.5GiB`` or ``300MB``."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?B|B)?\s*", text, re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write bytes, or a number with KB, MB, GB, KiB, MiB or GiB")
    return round(float(match[1]) * (DECIMAL | BINARY)[(match[2] or "").upper()])


def at_least(low: float, whole: bool = False) -> Callable[[str], Any]:
    """An argparse type: a number of at least ``low``."""

    def parse(text: str) -> Any:
        try:
            value = int(text) if whole else float(text)
        except ValueError:
            value = None
        if value is None or not low <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} is not a {'whole ' if whole else ''}number of at least {low:g}")
        return value

    return parse


def positive(text: str) -> float:
    """An argparse type: a number above 0."""
    value = at_least(0)(text)
    if not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def whole(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    return at_least(1, whole=True)(text)


def rule(text: str) -> str | int:
    """An argparse type: a rule's name or its K."""
    return int(text) if text.isdigit() else text


def several(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """An argparse type: values separated by commas."""
    return lambda text: [parse(part) for part in text.split(",")]


def human(nbytes: float) -> str:
    """``1.50 GiB``."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes:.0f} B"


def milliseconds(seconds: float) -> str:
    """``12.3 ms``; ``4.5 us`` below a tenth of one."""
    return f"{seconds * 1e6:.1f} us" if 0 < abs(seconds) < 1e-4 else f"{seconds * 1e3:.1f} ms"


def columns(rows: Sequence[Sequence[Any]], left: int = 1) -> list[str]:
    """Lines of a table; the first ``left`` columns are aligned left, the others right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[c]) for row in cells) for c in range(len(cells[0]))]
    return [
        "  ".join(cell.ljust(w) if c < left else cell.rjust(w) for c, (cell, w) in enumerate(zip(row, widths))).rstrip()
        for row in cells
    ]


def show(result: dict[str, Any], text: str, as_json: bool) -> None:
    """Print a result as text, or as one line of JSON with ``"ok": true``."""
    print(json.dumps({"ok": True, **result}) if as_json else text)


def complain(message: str, as_json: bool) -> None:
    """Print an error in one line: as JSON on stdout, or as text on stderr."""
    line = " ".join(message.split())
    print(json.dumps({"ok": False, "error": line}) if as_json else f"error: {line}", file=sys.stdout if as_json else sys.stderr)
