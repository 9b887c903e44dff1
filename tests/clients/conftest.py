"""Fixtures of the client tests."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from support.client_launcher import Launcher
from support.trainer_jobs import EXAMPLES


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory, operators: None) -> Launcher:
    return Launcher(tmp_path_factory.mktemp("clients"))


@pytest.fixture(scope="session")
def ds_config(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """``ds_config(example, rule)``: the path of an example's config with another rule; with None that of stock ZeRO-3."""
    folder = tmp_path_factory.mktemp("configs")

    def make(example: str, rule: str | None, **more: Any) -> str:
        config = json.loads((EXAMPLES / example).read_text())
        assert config.pop("cyclic") == {"enabled": True}
        if "optimizer" in config:
            config["optimizer"]["params"]["torch_adam"] = True  # else DeepSpeed compiles its own, for minutes
        if rule is not None:
            config["cyclic"] = {"enabled": True, "rule": rule, "timeout_seconds": 60}
        path = folder / f"{len(list(folder.iterdir()))}.json"
        path.write_text(json.dumps({**config, **more}))
        return str(path)

    return make
