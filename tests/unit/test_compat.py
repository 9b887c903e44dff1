"""What the package relies on of DeepSpeed is written down, checked at registration, and named when it is missing."""

import ast
import functools
import sys
import warnings
from pathlib import Path

import deepspeed
import pytest
import torch

from deepspeed_cdp.integration import compat, plugin

PACKAGE = Path(compat.__file__).parents[1]
ON = {"train_batch_size": 4, "zero_optimization": {"stage": 3}, "cyclic": {"enabled": True}, "optimizer": {"type": "AdamW"}}


@pytest.fixture
def unregistered():
    plugin.unregister()
    yield
    plugin.register()


def holder(path):
    """The object that holds the last name of a path, and that name."""
    module, _, names = path.partition(":")
    *parents, last = names.split(".")
    found = sys.modules[module]
    for name in parents:
        found = getattr(found, name)
    while isinstance(found, type) and last not in vars(found):  # inherited
        found = found.__mro__[1]
    return found, last


def test_this_deepspeed_has_everything():
    assert compat.problem() is None and not list(compat.missing())


@pytest.mark.parametrize("path", [*compat.PRESENT, *dict.fromkeys((*compat.OVERRIDDEN, *compat.CALLED, *compat.MENTIONED))])
def test_each_name_is_missed(path, monkeypatch):
    monkeypatch.delattr(*holder(path))
    assert any(path.replace(":", ".") in words for words in compat.missing())


def changed(path, monkeypatch, source):
    scope = {}
    exec(source, scope)
    monkeypatch.setattr(*holder(path), scope["f"])


@pytest.mark.parametrize("path", compat.OVERRIDDEN)
def test_a_changed_signature_of_an_overridden_function_is_told(path, monkeypatch):
    parameters = compat.OVERRIDDEN[path]
    changed(path, monkeypatch, f"def f({', '.join((*parameters, 'more'))}): pass")
    assert f"{path.replace(':', '.')}({', '.join(parameters)})" in list(compat.missing())


@pytest.mark.parametrize("path", compat.CALLED)
def test_a_parameter_that_is_gone_is_told(path, monkeypatch):
    *others, last = compat.CALLED[path]
    changed(path, monkeypatch, f"def f({', '.join(others)}): pass")
    assert f"parameter {last!r} of {path.replace(':', '.')}" in list(compat.missing())


@pytest.mark.parametrize("path", compat.MENTIONED)
def test_code_that_reads_another_name_is_told(path, monkeypatch):
    changed(path, monkeypatch, "def f(self): return self.other")
    assert {f"{name!r} in the code of {path.replace(':', '.')}" for name in compat.MENTIONED[path]} <= set(compat.missing())


def test_a_missing_name_is_a_warning_at_import_and_an_error_when_enabled(unregistered, monkeypatch):
    monkeypatch.delattr(deepspeed.DeepSpeedEngine, "_configure_zero_optimizer")
    sentence = (
        "DeepSpeed 0.19.8 lacks deepspeed.runtime.engine.DeepSpeedEngine._configure_zero_optimizer and 1 more, on which the "
        "cyclic engine relies; install a tested version (DeepSpeed 0.19.8)"
    )
    with pytest.warns(RuntimeWarning) as told:
        plugin.register()
    assert str(told[0].message) == f'{sentence}; until then "cyclic": {{"enabled": true}} is an error' and len(told) == 1
    with pytest.raises(RuntimeError) as caught:
        deepspeed.initialize(model=torch.nn.Linear(2, 2), config=dict(ON))
    assert str(caught.value) == sentence


@pytest.mark.parametrize("enabled", [False, None])
def test_a_missing_name_leaves_others_alone(unregistered, monkeypatch, enabled):
    """Without an enabled block nothing but the warning differs from stock DeepSpeed."""
    monkeypatch.delattr(deepspeed.PipelineModule, "_partition_layers")
    config, pipeline = deepspeed.DeepSpeedConfig._initialize_params, deepspeed.PipelineModule.__init__
    built = []

    @functools.wraps(deepspeed.initialize)
    def stock(model=None, config=None):
        built.append(config)
        return ("stock",)

    monkeypatch.setattr(deepspeed, "initialize", stock)
    with pytest.warns(RuntimeWarning, match="lacks deepspeed.runtime.pipe.module.PipelineModule._partition_layers, on"):
        plugin.register()
    raw = {key: value for key, value in ON.items() if key != "cyclic"}
    raw |= {} if enabled is None else {"cyclic": {"enabled": enabled}}
    assert deepspeed.initialize(model=torch.nn.Linear(2, 2), config=raw) == ("stock",) and built == [raw]
    assert (deepspeed.DeepSpeedConfig._initialize_params, deepspeed.PipelineModule.__init__) == (config, pipeline)


@pytest.mark.parametrize(
    ("module", "version", "sentence"),
    [
        (deepspeed, "0.18.3", "DeepSpeed is 0.18.3, but the cyclic engine needs at least 0.19.8; install a tested version "),
        (torch, "2.5.1+cu124", "torch is 2.5.1+cu124, but the cyclic engine needs at least 2.6; install a tested version "),
    ],
)
def test_older_versions_are_refused(module, version, sentence, monkeypatch):
    monkeypatch.setattr(module, "__version__", version)
    assert compat.problem().startswith(sentence)
    with pytest.raises(RuntimeError, match="needs at least"):
        compat.require()


@pytest.mark.parametrize(
    ("module", "version", "words"),
    [
        (deepspeed, "0.19.9", "DeepSpeed 0.19.9 is newer than the tested versions (DeepSpeed 0.19.8)"),
        (torch, "2.14.0", "torch 2.14.0 is newer than the tested versions (torch 2.6 to 2.13)"),
        (torch, "2.13.1+cpu", None),
        (torch, "2.6.0", None),
    ],
)
def test_newer_versions_are_told_when_the_engine_is_enabled(module, version, words, monkeypatch):
    said = []
    monkeypatch.setattr(deepspeed.utils.logger, "warning", lambda text, *_: said.append(text))
    monkeypatch.setattr(module, "__version__", version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plugin.register()
        compat.require()
    assert said == ([words] if words else [])


def test_the_project_file_asks_for_the_tested_minimum():
    text = (PACKAGE.parent / "pyproject.toml").read_text()
    assert f'"deepspeed>={compat.DEEPSPEED[0]}"' in text and f'"torch>={compat.TORCH[0]}"' in text


def private_names(path):
    """Names with one leading underscore that a file reads from an object, or imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("deepspeed."):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def own_names():
    """Private names that the package defines itself: functions, classes, and attributes it assigns."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return found


def relied_on():
    """Private names in the tables of compat."""
    paths = (*compat.OVERRIDDEN, *compat.CALLED, *compat.MENTIONED, *compat.PRESENT)
    names = {name for path in paths for name in path.split(":")[1].split(".")}
    names |= {name for mentioned in compat.MENTIONED.values() for name in mentioned}
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def test_only_integration_names_what_is_private_to_deepspeed():
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name != "integration":
            found = relied_on() & set(private_names(path))
            assert not found, f"{path.relative_to(PACKAGE)} names {found}, which is private to DeepSpeed"


def test_every_private_name_that_integration_reads_is_checked():
    outside = {"_opt_called", "_parallel_world_size"}  # torch's, and the end of names of the user's mpu
    checked = own_names() | relied_on() | outside
    for path in (PACKAGE / "integration").glob("*.py"):
        used = {n for n in private_names(path) if n.startswith("_") and not n.startswith("__") and n.isidentifier()}
        unchecked = used - checked
        assert not unchecked, f"{path.name} relies on {unchecked}, which compat does not check"
