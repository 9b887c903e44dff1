"""Writes docs/errors.md, the catalogue of error messages, from the package's source: ``python docs/make_errors.py``.

The script parses every module and collects the text of each error that the module raises, or that a helper function returns to be
raised. Values that are only known at run time are shown as ``{name}``. tests/unit/test_errors_page.py fails if the page is stale.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "deepspeed_cdp"
PAGE = ROOT / "docs" / "errors.md"
CLASSES = {  # error class -> when it is raised
    "ValueError": "A setting, an argument or a call is wrong. The message names it and says how to fix it.",
    "HandoffError": "A message did not arrive: a peer failed, is late or is out of step. Restart from the last checkpoint.",
    "DivergenceError": "Ranks that must be equal differ. Restart from a checkpoint before the step that it names.",
    "CheckpointError": "A checkpoint cannot be written or read. Nothing was changed.",
    "NotRestoredError": "A save failed, and the older folder could not get its name back. The message says where it is.",
    "RuntimeError": "The machine lacks something, or the engine cannot continue.",
    "OutOfOrder": "The model uses its units in another order than the plan.",
    "UserError": "The command line got wrong arguments or input. The exit code is 2.",
    "NotImplementedError": "A function of DeepSpeed's interface has no meaning here.",
    "PlanError": "The dry-run found a fault in a plan. Report it.",
    "ScheduleError": "The dry-run found a fault in a pipeline's timetable. Report it.",
}
FOLDERS = {  # in the order of the page
    "integration": "Configuration and engines",
    "model": "Units of a model",
    "plan": "Plans",
    "runtime": "Training",
    "optim": "Optimizer",
    "pipeline": "Pipelines",
    "transport": "Transports",
    "native": "The extension in C++ (a log line; Python does its work then)",
    "checkpoint": "Checkpoints",
    "analysis": "Simulation and analysis",
    "cli": "Command line",
    "verify": "Dry-run",
}
IN_CPP = ("Memory", "forbid_reads")  # functions of C++ whose last argument becomes the message of a later RuntimeError
REASONS = ("fail", "abort")  # methods of transports whose argument becomes the message of a later HandoffError
DIAGNOSES = ("diagnose", "explain")  # methods of transports that return such a message
OF_METHODS = ("splitlines", "strip", "lower", "tolist", "item", "decode", "partition")  # value.method() is shown as {value}
MOST = 12  # variants of one message

HEAD = """# Errors

This page lists every error message of the package. `docs/make_errors.py` generates it from the source. `{name}` stands for a
value that is known at run time, `(a | b)` for one of several words. An entry without a class is a `ValueError`.

| class | meaning |
|---|---|
"""

Names = dict[str, list[ast.expr]]  # a name -> the text expressions that it may stand for


class Module:
    """One parsed module: its functions, its text constants, and where its imported names come from."""

    def __init__(self, path: Path) -> None:
        self.tree = ast.parse(path.read_text())
        self.all = [n for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef)]
        self.functions = {n.name: n for n in self.all}
        self.constants = _assigned(self.tree.body)
        self.imports = {
            a.asname or a.name: (n.module, a.name)
            for n in ast.walk(self.tree)
            if isinstance(n, ast.ImportFrom) and n.module
            for a in n.names
        }


class Catalogue:
    """All error messages of the package."""

    def __init__(self, package: Path = PACKAGE) -> None:
        paths = [p for p in sorted(package.rglob("*.py")) if "former_paths" not in p.parts]
        self.modules = {".".join((package.name, *p.relative_to(package).with_suffix("").parts)): Module(p) for p in paths}

    def entries(self) -> list[tuple[str, str, str]]:
        """(module, error class, text), each once per module, in source order."""
        found: dict[tuple[str, str, str], None] = {}
        for name, module in self.modules.items():
            texts = list(self._of(module))
            if name.split(".")[1] == "transport":
                texts += [("HandoffError", text) for text in self._later(module)]
            found.update(dict.fromkeys((name, kind, text) for kind, text in texts if _says_something(text)))
        return list(found)

    def _of(self, module: Module) -> Iterator[tuple[str, str]]:
        for function in module.all:
            if any("field_validator" in ast.dump(d) for d in function.decorator_list):
                continue  # pydantic wraps the message; config._sentence writes another
            names = {**module.constants, **_assigned(function.body)}
            for node in _inside(function.body):
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                    yield from self._error(module, node.exc, names, 0)
                elif isinstance(node, ast.Call) and _called(node) in IN_CPP:
                    yield from (("RuntimeError", text) for text in self._texts(module, node.args[-1], names, frozenset()))

    def _error(self, module: Module, call: ast.Call, names: Names, depth: int) -> Iterator[tuple[str, str]]:
        """The messages of an error that ``call`` makes: a class, or a helper function that returns an error."""
        called = _called(call)
        if called in CLASSES:
            if call.args:
                yield from ((called, text) for text in self._texts(module, call.args[0], names, frozenset()))
            return
        home, helper = self._function(module, called)
        if helper is None or depth > 2:
            return
        parameters = [a.arg for a in helper.args.args if a.arg not in ("self", "cls")]
        given = {**dict(zip(parameters, call.args)), **{k.arg: k.value for k in call.keywords if k.arg}}
        inner = {**home.constants, **_assigned(helper.body)}
        for name, value in given.items():
            values = names.get(value.id, [value]) if isinstance(value, ast.Name) else [value]
            inner[name] = [v for v in values if _is_text(v)]
        for node in _inside(helper.body):
            made = node.value if isinstance(node, ast.Return) else node.exc if isinstance(node, ast.Raise) else None
            if isinstance(made, ast.Call):
                yield from self._error(home, made, inner, depth + 1)

    def _later(self, module: Module) -> Iterator[str]:
        """What a transport notes as the reason of an error that it raises later."""
        for function in module.all:
            names = {**module.constants, **_assigned(function.body)}
            for node in _inside(function.body):
                noted: ast.expr | None = None
                if isinstance(node, ast.Call) and _called(node) in REASONS and node.args:
                    noted = node.args[0]
                elif isinstance(node, ast.Return) and function.name in DIAGNOSES:
                    noted = node.value
                if noted is not None and not isinstance(noted, ast.Call):
                    yield from self._texts(module, noted, names, frozenset())

    def _function(self, module: Module, name: str) -> tuple[Module, ast.FunctionDef | None]:
        if name in module.functions:
            return module, module.functions[name]
        source, there = module.imports.get(name, ("", ""))
        return self._function(self.modules[source], there) if source in self.modules else (module, None)

    def _texts(self, module: Module, node: ast.expr, names: Names, within: frozenset[str]) -> list[str]:
        """All texts that an expression may have, with ``{name}`` for what is not known."""

        def all_of(nodes: Iterable[ast.expr], joint: bool) -> list[str]:
            each = [self._texts(module, n, names, within) for n in nodes]
            if not joint:
                return [text for texts in each for text in texts]
            return ["".join(texts) for texts in product(*each)]

        found: list[str] = []
        if isinstance(node, ast.Constant):
            return [str(node.value)]
        if isinstance(node, ast.FormattedValue):
            return self._texts(module, node.value, names, within)
        if isinstance(node, ast.JoinedStr):
            found = all_of(node.values, True)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and (_is_text(node.left) or _is_text(node.right)):
            found = all_of((node.left, node.right), True)
        elif isinstance(node, ast.IfExp):
            said = [n for n in (node.body, node.orelse) if not (isinstance(n, ast.Constant) and n.value in ("", None))]
            found = all_of(said, False)
        elif isinstance(node, ast.Name) and node.id not in within:
            home, values = module, names.get(node.id)
            source, there = module.imports.get(node.id, ("", ""))
            if values is None and source in self.modules and not there.startswith("__"):
                home, values = self.modules[source], self.modules[source].constants.get(there)
            for value in values or ():
                found += [t for t in self._texts(home, value, names, within | {node.id}) if t]
        elif isinstance(node, ast.Call):
            home, helper = self._function(module, _called(node))
            if helper is not None and helper.name not in within:
                inner = {**home.constants, **_assigned(helper.body)}
                for n in _inside(helper.body):
                    if (
                        isinstance(n, ast.Return)
                        and n.value is not None
                        and (_is_text(n.value) or isinstance(n.value, ast.IfExp))
                    ):
                        found += self._texts(home, n.value, inner, within | {helper.name})
                if not all(_says_something(text) for text in found):
                    found = []
        found = list(dict.fromkeys(found))
        return found if 0 < len(found) <= MOST else ["{" + _placeholder(node) + "}"]


def _says_something(text: str) -> bool:
    return len(re.sub(r"\{.*?\}", "", text).split()) > 1


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _inside(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """All nodes of a body in source order, without functions that are defined in it."""
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            yield node
            yield from _inside(list(ast.iter_child_nodes(node)))  # type: ignore[arg-type]


def _assigned(body: list[ast.stmt]) -> Names:
    """Names that a body assigns nothing but text (or None) to."""
    names: Names = {}
    other = set()
    for node in _inside(body):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            pairs = [(node.targets[0], node.value)]
            if isinstance(node.targets[0], ast.Tuple):
                targets = node.targets[0].elts
                pairs = list(zip(targets, node.value.elts if isinstance(node.value, ast.Tuple) else [node.value] * len(targets)))
            for target, value in pairs:
                if isinstance(target, ast.Name) and _is_text(value):
                    names.setdefault(target.id, []).append(value)
                elif isinstance(target, ast.Name) and not (isinstance(value, ast.Constant) and value.value is None):
                    other.add(target.id)
        elif isinstance(node, ast.For | ast.comprehension | ast.NamedExpr):
            other |= {n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)}
    return {name: values for name, values in names.items() if name not in other}


def _is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _is_text(node.left) or _is_text(node.right)
    if isinstance(node, ast.IfExp):
        return _is_text(node.body) or _is_text(node.orelse)
    return isinstance(node, ast.JoinedStr) or isinstance(node, ast.Constant) and isinstance(node.value, str)


def _placeholder(node: ast.expr) -> str:
    """A short name for a value: the last word of its expression."""
    if isinstance(node, ast.Name):
        return node.id.strip("_")
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Attribute):
        return _placeholder(node.value) if node.attr in ("__name__", "__class__", "value") else node.attr.strip("_")
    if isinstance(node, ast.Subscript):
        return _placeholder(
            node.slice if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str) else node.value
        )
    if isinstance(node, ast.Call):
        name, first = _called(node), (node.args or [node.func])[0]
        if name == "map" and len(node.args) > 1:
            return _placeholder(node.args[1])
        if name in ("type", "len"):
            return f"{'class' if name == 'type' else 'number'} of {_placeholder(first)}"
        if isinstance(node.func, ast.Attribute) and (name in OF_METHODS or not node.args):
            return _placeholder(node.func.value) if name in OF_METHODS else name
        return _placeholder(first)
    if isinstance(node, ast.GeneratorExp | ast.ListComp | ast.SetComp):
        return _placeholder(node.generators[0].iter)
    if isinstance(node, ast.BoolOp):
        return _placeholder(node.values[0])
    if isinstance(node, ast.Starred):
        return _placeholder(node.value)
    return re.sub(r"\bself\.", "", ast.unparse(node)).replace("{", "(").replace("}", ")")


def _merged(texts: list[str]) -> list[str]:
    """Texts that differ in one word alone become one, in which ``(a | b)`` stands for the word."""
    rows = [text.split() for text in texts]
    for at in range(max(map(len, rows))):
        groups: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
        for row in rows:
            groups.setdefault((tuple(row[:at]), tuple(row[at + 1 :])), []).extend(row[at : at + 1])
        rows = [
            [*before, *([f"({' | '.join(words)})"] if len(words) > 1 else words), *after]
            for (before, after), words in groups.items()
        ]
    return [" ".join(row) for row in rows]


def render(entries: list[tuple[str, str, str]]) -> str:
    """The page."""
    lines = [HEAD + "\n".join(f"| `{name}` | {meaning} |" for name, meaning in CLASSES.items())]
    for folder, title in FOLDERS.items():
        mine = [e for e in entries if e[0].split(".")[1] == folder]
        lines += ["", f"## {title}"]
        for module in dict.fromkeys(e[0] for e in mine):
            new = [e for e in mine if e[0] == module and all(e[1:] != o[1:] for o in mine[: mine.index(e)])]
            lines += ["", f"`{module}`", ""] if new else []
            for kind in dict.fromkeys(e[1] for e in new):
                for text in _merged([e[2] for e in new if e[1] == kind]):
                    lines.append(f"- {'' if kind == 'ValueError' else f'`{kind}`: '}`` {text} ``")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(Catalogue().entries()))
