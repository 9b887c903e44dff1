"""Writes the tables of docs/models.md: ``python docs/make_models.py`` (from anywhere).

They are made from tests/support/architectures.py and tests/support/reports.py. tests/unit/test_models_page.py checks that the
page is current.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"


def tried() -> str:
    """A line per kind."""
    from support.architectures import ARCHITECTURES

    kinds: dict[str, list[str]] = {}
    for name, architecture in ARCHITECTURES.items():
        kinds.setdefault(architecture.kind, []).extend([] if architecture.fails else [name])
    lines = ["| kind | same losses as stock ZeRO-3 | how many |", "|---|---|---|"]
    lines += [f"| {kind} | {'; '.join(names)} | {len(names)} |" for kind, names in kinds.items()]
    return "\n".join([*lines, f"| all | | {sum(map(len, kinds.values()))} |"])


def failing() -> str:
    """A line per configuration that does not train, or that stock cannot train as the others."""
    from support.architectures import ARCHITECTURES, LEFT_OUT

    lines = ["| model | result |", "|---|---|"]
    lines += [f"| {name} | fails: {a.fails} |" for name, a in ARCHITECTURES.items() if a.fails]
    alike = "same losses, but all ranks get the same batch: stock hangs if ranks choose different experts; here they may"
    lines += [f"| {name} | {alike} |" for name, a in ARCHITECTURES.items() if a.alike]
    return "\n".join([*lines, *(f"| {name} | not compared: {why} |" for name, why in LEFT_OUT.items())])


def reported() -> str:
    """A line per public report."""
    from support.reports import REPORTS

    lines = ["| report | script | stock ZeRO-3 | here |", "|---|---|---|---|"]
    for x in REPORTS:
        repository, _, number = x.source.partition("#")
        link = f"[{x.source}](https://github.com/{repository}/issues/{number})"
        here = "runs" if x.stock else f"differs: {x.differs}" if x.differs else "the same numbers under `dp`"
        lines.append(f"| {link} | {x.asks} | {x.stock or 'runs'} | {here} |")
    return "\n".join(lines)


def render(text: str) -> str:
    """The page with its tables made anew."""
    for marker, made in (("tried", tried()), ("failing", failing()), ("reported", reported())):
        line = f"<!-- {marker} -->"
        before, _, after = text.split(line)
        text = f"{before}{line}\n\n{made}\n\n{line}{after}"
    return text


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    PAGE.write_text(render(PAGE.read_text()))
