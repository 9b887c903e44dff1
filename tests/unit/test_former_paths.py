"""Import paths that documents once gave users keep working, and are the same objects as at their new places."""

import importlib
import subprocess
import sys

import pytest

MOVED = {
    "convert.get_fp32_state_dict_from_zero_checkpoint": "cli.convert",
    "convert.main": "cli.convert",  # zero_to_fp32.py in saved checkpoints imports it
    "files.CheckpointError": "errors",
    "pipe.module.pyramid_topology": "integration.pipe_module",
    "reference.train": "analysis.reference",
    "replicas.grid": "plan.replicated",
    "schedule.Schedule": "plan.schedule",
    "schedule.grid": "plan.schedule",
    "simulated.Simulator": "analysis.learning_simulator",
    "simulated.stages_of": "analysis.learning_simulator",
    "support.as_markdown": "integration.support",
}


@pytest.mark.parametrize("path", MOVED)
def test_a_former_path_is_the_same_object(path: str):
    module, name = path.rsplit(".", 1)
    former = importlib.import_module(f"deepspeed_cdp.{module}")
    assert getattr(former, name) is getattr(importlib.import_module(f"deepspeed_cdp.{MOVED[path]}"), name)


@pytest.mark.parametrize(("module", "arguments", "said"), [("convert", ["--help"], "usage:"), ("support", [], "| setting")])
def test_a_former_command_runs(module: str, arguments: list[str], said: str):
    command = [sys.executable, "-m", f"deepspeed_cdp.{module}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and said in done.stdout, done.stdout + done.stderr
