"""Lightning's DeepSpeedStrategy, which refuses CPUs: examples/lightning_train.py under stock ZeRO-3, dp and cdp-v2, 2 GPUs each.

    python tests/gpu/lightning_runs.py

Under dp all losses and the saved weights must equal ZeRO-3's; a cdp-v2 run that is resumed half-way must end as one that was
flushed there, bitwise (Lightning validates, and so flushes, half-way). Runs go two at a time where there are four GPUs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

STEPS = 20  # two epochs, each of which ends with a validation
REPOSITORY = Path(__file__).resolve().parents[2]
BASE = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 1.0,
}
# deepspeed_cdp is imported first, as the installed .pth would do
START = "import runpy, sys; import deepspeed_cdp; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


def run(folder: Path, name: str, gpus: str, cyclic: dict[str, Any] | None, steps: int, resume: Path | None = None) -> None:
    """One run; its output in ``name``.log."""
    config = folder / f"{name}.json"
    block = {} if cyclic is None else {"cyclic": {"enabled": True, "timeout_seconds": 60, **cyclic}}
    config.write_text(json.dumps({**BASE, **block}))
    starter = folder / "start.py"
    starter.write_text(START)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(starter),
        str(REPOSITORY / "examples/lightning_train.py"),
        "--config",
        str(config),
        "--steps",
        str(steps),
        "--windows",
        "40",
        "--validate_every",
        "10",
        "--in_order",
        "--precision",
        "32-true",
        "--out",
        str(folder / name),
        *(["--resume", str(resume)] if resume else []),
    ]
    path = f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}"
    with open(folder / f"{name}.log", "w") as log:
        code = subprocess.run(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=120,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": gpus, "PYTHONPATH": path},
        ).returncode
    assert code == 0, f"{name} exited with {code}\n" + (folder / f"{name}.log").read_text()[-4000:]


def losses(folder: Path, name: str, which: str = "training") -> torch.Tensor:
    return torch.tensor([json.loads((folder / name / f"losses_{r}.json").read_text())[which] for r in range(2)])


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    from deepspeed_cdp.cli.convert import get_fp32_state_dict_from_zero_checkpoint

    return get_fp32_state_dict_from_zero_checkpoint(str(folder / name / "last.ckpt"), tag="checkpoint")


def far(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys(), (list(one)[:3], list(other)[:3])
    return max(float((one[n] - other[n]).abs().max()) for n in one)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    good = True
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor() as pool:
        folder, gpus = Path(name), os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",")
        pairs = (",".join(gpus[:2]), ",".join(gpus[2:4] if torch.cuda.device_count() >= 4 else gpus[:2]))

        def both(*jobs: tuple) -> None:
            started = [pool.submit(run, folder, job[0], pair, *job[1:]) for job, pair in zip(jobs, pairs)]
            for job in started:
                job.result()

        both(("zero3", None, STEPS), ("dp", {"rule": "dp"}, STEPS))
        both(("cdp-v2", {}, STEPS), ("half", {}, STEPS // 2))
        run(folder, "resumed", pairs[0], {}, STEPS, folder / "half" / "last.ckpt")
        apart = float((losses(folder, "dp") - losses(folder, "zero3")).abs().max())
        held_out = float((losses(folder, "dp", "held out") - losses(folder, "zero3", "held out")).abs().max())
        moved = far(weights(folder, "dp"), weights(folder, "zero3"))
        checks = {
            "dp's training losses as ZeRO-3's": (apart, 1e-5),
            "dp's validation losses as ZeRO-3's": (held_out, 1e-5),
            "dp's weights as ZeRO-3's": (moved, 1e-4),
            "cdp-v2, resumed half-way, weights": (far(weights(folder, "resumed"), weights(folder, "cdp-v2")), 0.0),
        }
        for what, (value, most) in checks.items():
            good &= value <= most
            print(f"{'ok  ' if value <= most else 'BAD '} {what}: {value:.2e}, at most {most:.0e}", flush=True)
        v2 = losses(folder, "cdp-v2").mean(0)
        print(
            f"     cdp-v2's mean loss of both ranks, first and last step: {v2[0]:.4f}, {v2[-1]:.4f}; "
            f"ZeRO-3's {losses(folder, 'zero3').mean(0)[-1]:.4f}"
        )
    print("passed" if good else "failed", flush=True)
    sys.exit(not good)


if __name__ == "__main__":
    main()
