"""Registration: what deepspeed.initialize builds, from every way to give it a config, and that nothing else changes."""

import base64
import importlib
import inspect
import json
import sys
import types
from argparse import Namespace

import deepspeed
import pytest
import torch
from deepspeed.moe.layer import MoE

import deepspeed_cdp
import deepspeed_cdp_autoload
from deepspeed_cdp.integration import plugin

ON = {"train_batch_size": 4, "zero_optimization": {"stage": 3}, "cyclic": {"enabled": True}, "optimizer": {"type": "AdamW"}}
OFF = {**ON, "cyclic": {"enabled": False}}
NONE = {key: value for key, value in ON.items() if key != "cyclic"}


class StandIn(deepspeed.DeepSpeedEngine):
    """Takes the place of CyclicEngine: records the arguments and builds nothing."""

    def __init__(self, **kwargs):
        torch.nn.Module.__init__(self)
        self.given = kwargs
        self.optimizer = self.training_dataloader = self.lr_scheduler = None

    def _configure_python_gc(self):
        pass

    def destroy(self):
        pass

    def __del__(self):
        pass


class StandInStock(StandIn):
    """Takes the place of the stock engine, so that no process group is needed."""


@pytest.fixture
def world(monkeypatch):
    """Registered afresh; engines are stand-ins, nothing is initialised."""
    plugin.unregister()
    monkeypatch.setattr(deepspeed, "DeepSpeedEngine", StandInStock)
    monkeypatch.setattr(deepspeed.comm, "init_distributed", lambda *args, **kwargs: None)
    monkeypatch.setattr(plugin, "engine_class", lambda: Cyclic)
    plugin.register()
    yield
    plugin.register()


class Cyclic(StandInStock):
    pass


def model():
    return torch.nn.Linear(2, 2)


def as_path(raw, folder):
    path = folder / "ds_config.json"
    path.write_text(json.dumps(raw))
    return str(path)


def as_base64(raw):
    return base64.urlsafe_b64encode(json.dumps(raw).encode()).decode()


WAYS = {
    "config": lambda raw, folder: {"config": dict(raw)},
    "config path": lambda raw, folder: {"config": as_path(raw, folder)},
    "config base64": lambda raw, folder: {"config": as_base64(raw)},
    "config_params": lambda raw, folder: {"config_params": dict(raw)},
    "args": lambda raw, folder: {"args": Namespace(deepspeed_config=as_path(raw, folder))},
    "args base64": lambda raw, folder: {"args": Namespace(deepspeed_config=as_base64(raw))},
    "deepscale": lambda raw, folder: {"args": Namespace(deepspeed_config=None, deepscale_config=as_path(raw, folder))},
    "args and config": lambda raw, folder: {"args": Namespace(deepspeed_config=None, local_rank=0), "config": dict(raw)},
}


USE = {key: value for key, value in ON.items() if key != "optimizer"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("raw, expected", [(ON, Cyclic), (OFF, StandInStock), (NONE, StandInStock), (USE, StandInStock)])
def test_engine_follows_the_config(world, tmp_path, way, raw, expected):
    result = deepspeed.initialize(model=model(), **WAYS[way](raw, tmp_path))
    assert type(result) is tuple and len(result) == 4 and type(result[0]) is expected
    assert result[0].given["config_class"].cyclic_config.enabled == (raw is ON)
    assert deepspeed.DeepSpeedEngine is StandInStock and isinstance(result[0], deepspeed.DeepSpeedEngine)


@pytest.mark.parametrize(
    ("key", "told"), [("cylic", True), ("Cyclic", True), ("cyclic_", True), ("cycles", False), ("data_types", False)]
)
def test_a_block_misspelt_is_told(world, key, told, monkeypatch):
    """DeepSpeed takes keys that it does not know in silence."""
    said = []
    monkeypatch.setattr(deepspeed.utils.logger, "warning", lambda text, *_: said.append(text))
    engine = deepspeed.initialize(model=torch.nn.Linear(2, 2), config={**NONE, key: {"enabled": True}})[0]
    words = (f"{key} is in the config", "no effect", "did you mean 'cyclic'?")
    assert type(engine) is StandInStock and any(all(w in text for w in words) for text in said) == told


def test_positional_arguments_reach_the_engine(world):
    given = model()
    result = deepspeed.initialize(Namespace(deepspeed_config=as_base64(ON)), given, None, given.parameters())
    assert type(result[0]) is Cyclic and result[0].given["model"] is given


def test_stock_class_is_back_after_an_error(world, monkeypatch):

    def fail(self, **kwargs):
        assert deepspeed.DeepSpeedEngine is Cyclic
        raise RuntimeError("in the engine")

    monkeypatch.setattr(Cyclic, "__init__", fail)
    with pytest.raises(RuntimeError, match="in the engine"):
        deepspeed.initialize(model=model(), config=dict(ON))
    assert deepspeed.DeepSpeedEngine is StandInStock


def test_engine_module_is_not_imported_without_the_key(world, monkeypatch):
    monkeypatch.setattr(plugin, "engine_class", lambda: pytest.fail("asked for the cyclic engine"))
    for raw in (OFF, NONE):
        deepspeed.initialize(model=model(), config=dict(raw))


def test_engine_class_is_the_real_one_by_default(monkeypatch):
    module = types.ModuleType("deepspeed_cdp.integration.engine")
    module.CyclicEngine = Cyclic
    monkeypatch.setitem(sys.modules, "deepspeed_cdp.integration.engine", module)
    monkeypatch.setattr(deepspeed_cdp, "engine", module, raising=False)
    assert plugin.engine_class() is Cyclic and deepspeed_cdp.CyclicEngine is Cyclic


def test_an_initialize_that_ignores_the_class_is_noticed(world, monkeypatch):
    other = plugin._with_cyclic_engine(lambda model=None, config=None: (StandInStock(),))
    with pytest.raises(RuntimeError, match="built StandInStock, not Cyclic, although cyclic.enabled is true; remove "):
        other(model=model(), config=dict(ON))


def test_stock_errors_stay_stock_errors(world, tmp_path):
    path = as_path(ON, tmp_path)
    calls = [
        {},
        {"config": "no/such/file"},
        {"config": dict(ON), "args": Namespace(deepspeed_config=path)},
        {"args": Namespace(deepspeed_config=path, deepscale_config=path)},
    ]
    for kwargs in calls:
        errors = []
        for function in (deepspeed.initialize, deepspeed.initialize.__wrapped__):
            with pytest.raises((AssertionError, ValueError)) as caught:
                function(model=model(), **kwargs)
            errors.append((type(caught.value), str(caught.value)))
        assert errors[0] == errors[1]


def test_signature_and_name_are_the_stock_ones(world):
    stock = deepspeed.initialize.__wrapped__
    assert stock is not deepspeed.initialize
    assert inspect.signature(deepspeed.initialize) == inspect.signature(stock)
    assert deepspeed.initialize.__doc__ == stock.__doc__ and deepspeed.initialize.__name__ == "initialize"


def test_register_is_idempotent_and_undone_by_unregister(world):
    before = deepspeed.initialize, deepspeed.DeepSpeedConfig._initialize_params
    plugin.register()
    assert (deepspeed.initialize, deepspeed.DeepSpeedConfig._initialize_params) == before
    plugin.unregister()
    plugin.unregister()
    assert deepspeed.initialize is before[0].__wrapped__
    assert not hasattr(deepspeed.DeepSpeedConfig(dict(NONE)), "cyclic_config")
    plugin.register()
    assert deepspeed.DeepSpeedConfig(dict(NONE)).cyclic_config.enabled is False


def test_every_config_has_the_parsed_block(world, tmp_path):
    raw = {**ON, "cyclic": {"enabled": True, "rule": "cdp-v1"}}
    for config in (raw, as_path(raw, tmp_path)):
        assert deepspeed.DeepSpeedConfig(config).cyclic_config.rule == "cdp-v1"


@pytest.mark.parametrize(
    "cyclic, words",
    [
        (True, "cyclic is true"),
        ({"enabled": True, "rule": "cdp-v3"}, "cyclic.rule is 'cdp-v3'"),
        ({"enabled": True, "ruel": "dp"}, "did you mean cyclic.rule?"),
    ],
)
def test_wrong_block_stops_initialize_before_anything_is_built(world, monkeypatch, cyclic, words):
    monkeypatch.setattr(deepspeed.comm, "init_distributed", lambda *args, **kwargs: pytest.fail("went on"))
    with pytest.raises(ValueError) as caught:
        deepspeed.initialize(model=model(), config={**ON, "cyclic": cyclic})
    assert words in str(caught.value)


def test_hybrid_engine_is_refused(world):
    with pytest.raises(ValueError, match="^hybrid_engine.enabled is true: "):
        deepspeed.initialize(model=model(), config={**ON, "hybrid_engine": {"enabled": True}})


def test_placements_are_for_pipeline_modules(world):
    with pytest.raises(ValueError, match="^cyclic.placement is 'single', but the model is a Linear; .* use \"auto\".$"):
        deepspeed.initialize(model=torch.nn.Linear(1, 1), config={**ON, "cyclic": {"enabled": True, "placement": "single"}})


def test_dual_pipe_is_refused(world):
    class DualPipeVModule(deepspeed.PipelineModule):
        pass

    pipeline = DualPipeVModule.__new__(DualPipeVModule)
    with pytest.raises(ValueError, match="^model: DualPipeVModule is given: .* pass a PipelineModule.$"):
        deepspeed.initialize(model=pipeline, config=dict(ON))


def test_moe_layer_is_refused(world):
    layer = MoE.__new__(MoE)
    torch.nn.Module.__init__(layer)
    layer.ep_size = 2
    given = torch.nn.Sequential(model(), layer)
    with pytest.raises(ValueError, match="^model: deepspeed.moe.layer.MoE is at '1' with ep_size 2: "):
        deepspeed.initialize(model=given, config=dict(ON))
    assert type(deepspeed.initialize(model=given, config=dict(OFF))[0]) is StandInStock


def test_moe_layer_in_a_pipeline_is_refused(world):
    pipeline, layer = deepspeed.PipelineModule.__new__(deepspeed.PipelineModule), MoE.__new__(MoE)
    for module in (pipeline, layer):
        torch.nn.Module.__init__(module)
    layer.ep_size, pipeline.moe = 1, layer
    with pytest.raises(ValueError, match="^model: deepspeed.moe.layer.MoE is at 'moe' of a PipelineModule"):
        deepspeed.initialize(model=pipeline, config=dict(ON))


@pytest.mark.parametrize("kind", ["model", "tensor_model"])
def test_model_parallel_mpu_is_refused(world, kind):
    mpu = types.SimpleNamespace(get_data_parallel_world_size=lambda: 1)
    setattr(mpu, f"get_{kind}_parallel_world_size", lambda: 2)
    with pytest.raises(ValueError, match="^model: mpu is of size 2: "):
        deepspeed.initialize(model=model(), mpu=mpu, config=dict(ON))


def test_reload_of_deepspeed_registers_again(world, monkeypatch):
    monkeypatch.setattr(deepspeed, "initialize", deepspeed.initialize.__wrapped__)
    deepspeed_cdp_autoload.install()
    assert hasattr(deepspeed.initialize, plugin._STOCK)
    spec = importlib.util.find_spec("deepspeed")
    executed = []
    monkeypatch.setattr(deepspeed_cdp_autoload, "_register", lambda: executed.append(True))
    stub = types.ModuleType("deepspeed")
    spec.loader.get_code = lambda name: compile("initialize = None", "stub", "exec")  # what a reload would execute
    spec.loader.exec_module(stub)
    assert executed == [True] and type(spec.loader).__name__ == "SourceFileLoader"


def test_failed_registration_warns_and_half_an_uninstall_is_silent(monkeypatch, recwarn):

    def missing(name):
        class Finder:
            def find_spec(self, wanted, path=None, target=None):
                if wanted == "deepspeed_cdp.integration.plugin":
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        return Finder()

    for name, warns in (("deepspeed_cdp.integration.plugin", 0), ("deepspeed_cdp", 0), ("hjson", 1)):
        monkeypatch.setattr(sys, "meta_path", [missing(name), *sys.meta_path])
        monkeypatch.delitem(sys.modules, "deepspeed_cdp.integration.plugin", raising=False)
        deepspeed_cdp_autoload._register()
        assert len(recwarn) == warns, name
    assert "could not register its engine" in str(recwarn[0].message) and "hjson" in str(recwarn[0].message)


def test_finder_is_installed_once():
    deepspeed_cdp_autoload.install()
    deepspeed_cdp_autoload.install()
    assert sum(deepspeed_cdp_autoload._is_ours(finder) for finder in sys.meta_path) == 1


def test_public_names():
    assert deepspeed_cdp.register is plugin.register and deepspeed_cdp.CyclicConfig.__name__ == "CyclicConfig"
    with pytest.raises(AttributeError):
        _ = deepspeed_cdp.nothing
