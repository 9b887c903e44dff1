"""Imports run one way: each folder imports only the folders that its ``__init__`` names, and no module is part of a circle."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "deepspeed_cdp"
EVERYONE = {"errors", "version"}  # modules that any folder may import
MAY_IMPORT = {  # from the ground up
    "plan": set(),
    "native": set(),
    "transport": {"native"},
    "verify": {"plan"},
    "model": {"plan"},
    "optim": {"plan"},
    "runtime": {"plan", "model", "transport", "optim", "native"},
    "pipeline": {"plan", "model", "transport", "optim"},
    "checkpoint": {"optim", "runtime", "pipeline"},
    "integration": {"plan", "verify", "model", "transport", "optim", "runtime", "pipeline", "checkpoint"},
    "analysis": {"plan", "model", "optim"},
}
MAY_IMPORT["cli"] = set(MAY_IMPORT)
MAY_IMPORT["former_paths"] = set(MAY_IMPORT)
# Public modules of DeepSpeed that folders below integration/ use.
DEEPSPEED = {
    "transport": {"deepspeed.utils"},
    "model": {"deepspeed.runtime.zero.partition_parameters"},
    "optim": {"deepspeed.runtime.fp16.loss_scaler"},
    "runtime": {"deepspeed.utils"},
    "checkpoint": {"deepspeed", "deepspeed.utils", "deepspeed.runtime.fp16.loss_scaler", "deepspeed.runtime.zero.config"},
}


def modules() -> dict[str, Path]:
    """Every module by its dotted name; packages by theirs."""
    return {
        ".".join(("deepspeed_cdp", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in ROOT.rglob("*.py")
    }


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Modules that it imports, wherever in the file: at the top, in functions, for type checkers."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else str(node.module))
    return found - {name}


def folder(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


KNOWN = modules()
IMPORTS = {name: imports(name, path, KNOWN) for name, path in KNOWN.items()}


def test_every_folder_is_in_the_table_and_says_what_lives_there():
    folders = {p.name for p in ROOT.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert folders == set(MAY_IMPORT)
    for name in folders:
        docstring = ast.get_docstring(ast.parse((ROOT / name / "__init__.py").read_text()))
        assert docstring and len(docstring) < 600, name


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_folders_import_downwards(name: str):
    wrong = {
        f"{module} imports {other}"
        for module, others in IMPORTS.items()
        if folder(module) == name
        for other in others & KNOWN.keys()
        if folder(other) not in {name, "", *EVERYONE, *MAY_IMPORT[name]}
    }
    assert not wrong


def test_there_is_no_circle():
    """Depth first; a module that is met again while it is open closes one."""
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for other in sorted(IMPORTS[module] & KNOWN.keys()):
                if KNOWN[other].name != "__init__.py":
                    visit(other, (*path, module))
            done.add(module)

    for module in KNOWN:
        visit(module, ())


@pytest.mark.parametrize("name", ["plan", "verify", "analysis.timing"])
def test_pure_folders_import_no_torch(name: str):
    below = [m for m in KNOWN if m.startswith(f"deepspeed_cdp.{name}.")]
    code = f"import sys\nfor m in {below!r}: __import__(m)\nassert 'torch' not in sys.modules and 'deepspeed' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT.parent)
    assert done.returncode == 0 and below, done.stderr


def test_only_integration_knows_private_names_of_deepspeed():
    """Others import public names of the modules in the table."""
    for name, path in KNOWN.items():
        if folder(name) in ("integration", "cli", "former_paths", ""):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "deepspeed":
                assert node.module in DEEPSPEED[folder(name)], (name, node.module)
                assert not any(a.name.startswith("_") and not a.name.endswith("__") for a in node.names), name
            elif isinstance(node, ast.Import):
                assert not any(alias.name.split(".")[0] == "deepspeed" for alias in node.names), name
