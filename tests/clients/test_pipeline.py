"""examples/pipeline.py, an ordinary PipelineModule script, by DeepSpeed's launcher: stock, ``dp`` and ``cdp-v2``."""

import json
import re

import pytest


@pytest.mark.slow
def test_the_example_runs_unchanged(launcher, ds_config, tmp_path):
    size = ["--steps", "20", "--layers", "2", "--width", "32", "--length", "16"]

    def job(rule: str | None, *more: str) -> tuple[str, list[str]]:
        config = ds_config("pipeline_ds_config.json", rule)
        return ("pipeline.py", [*size, "--deepspeed_config", config, *more])

    text = launcher.run([job(None), job("dp"), job("cdp-v2", "--save", str(tmp_path))])
    lines = re.findall(r"(\w+), 2 stages on 2 rank\(s\): 20 steps in [\d.]+ s, held-out loss ([\d.]+) -> ([\d.]+)", text)
    assert [name for name, _, _ in lines] == ["PipelineEngine", "CyclicPipelineEngine", "CyclicPipelineEngine"], text[-3000:]
    for _, before, after in lines:
        assert before == lines[0][1] and float(after) < float(before) - 0.5
    assert abs(float(lines[1][2]) - float(lines[0][2])) < 0.02  # stock clips by the first stage's norm
    manifest = json.loads((tmp_path / "global_step20" / "cyclic.json").read_text())
    assert manifest["pipeline"]["placement"] == "pipeline" and (tmp_path / "latest").read_text() == "global_step20"
