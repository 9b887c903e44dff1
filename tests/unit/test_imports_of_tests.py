"""Test files import shared code from tests/support, never from each other."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FILES = sorted(p for p in TESTS.rglob("*.py") if "__pycache__" not in p.parts)
FORBIDDEN = {p.stem for p in FILES if p.parent != TESTS / "support"} | {"tests", "unit", "dist", "clients", "gpu", "long"}


def imported(source: str) -> set[str]:
    """The first names of all modules that the source imports, at any depth."""
    nodes = list(ast.walk(ast.parse(source)))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {name.split(".")[0] for name in plain | {n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.module}}


@pytest.mark.parametrize("file", FILES, ids=lambda p: str(p.relative_to(TESTS)))
def test_no_test_file_is_imported(file: Path) -> None:
    assert not imported(file.read_text()) & FORBIDDEN, "move what both files need to tests/support"


def test_a_forbidden_import_is_noticed() -> None:
    assert imported("def f():\n    from test_plan import make\n    import conftest") == {"test_plan", "conftest"}
    assert {"test_plan", "conftest", "rank_cases"} <= FORBIDDEN and "models" not in FORBIDDEN
