"""The Hugging Face Trainer on GPUs: examples/hf_trainer.py under stock ZeRO-3, dp and cdp-v2, which is also resumed half-way.

    python tests/gpu/trainer_runs.py [--ranks 4] [--cpu] [plain] [sequence] [tensor]

``sequence`` and ``tensor`` have groups of two ranks. Under dp losses and the saved weights must equal ZeRO-3's. A resumed cdp-v2
run must end as one that was not stopped, bitwise; accelerate 1.15 cannot resume with ``sequence``, so that is left out. Ranks
share GPUs where there are too few, over NCCL 2.30 or newer (``NCCL_MULTI_RANK_GPU_ENABLE=1``).
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from support.engine_work import farthest  # noqa: E402
from support.processes import free_port  # noqa: E402
from support.trainer_jobs import EXAMPLES, PARALLELISM, STEPS, trainer_arguments  # noqa: E402

SECONDS = 150  # for one job
REPOSITORY = Path(__file__).resolve().parents[2]
GROUPS: dict[str, dict[str, Any]] = {  # keys of the ds_config
    "plain": {},
    "sequence": {},
    "tensor": {"tensor_parallel": {"autotp_size": 2}},
}
RULES = {"stock": None, "dp": "dp", "cdp-v2": "cdp-v2", "resumed": "cdp-v2"}
# deepspeed_cdp is imported first, as the installed .pth would do
START = "import runpy, sys; import deepspeed_cdp; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
# before it where datasets is not installed: the script's import of it finds a list, and later ones, of transformers, nothing
STAND_IN = """
import sys, types, transformers

class Dataset(list):
    from_dict = classmethod(lambda cls, columns: cls(dict(zip(columns, row)) for row in zip(*columns.values())))
    select = lambda self, which: type(self)(self[i] for i in which)

class Once(types.ModuleType):
    def __getattr__(self, name):
        if name != "Dataset":
            raise AttributeError(name)
        sys.modules.pop("datasets", None)
        return Dataset

sys.modules["datasets"] = Once("datasets")
"""


def run(folder: Path, kind: str, name: str, ranks: int, cpu: bool) -> None:
    """One job; each rank's output in a file of its own."""
    arguments = trainer_arguments(folder, name, RULES[name], cpu, **GROUPS[kind])
    (folder / "start.py").write_text(START if importlib.util.find_spec("datasets") else STAND_IN + START)
    command = [sys.executable, str(folder / "start.py"), str(EXAMPLES / "hf_trainer.py"), *arguments]
    if name == "resumed":
        command += ["--resume_from_checkpoint", str(folder / f"cdp-v2/checkpoint-{STEPS // 2}")]
    gpus = 1 if cpu else torch.cuda.device_count()
    everyone = {
        **os.environ,
        **(PARALLELISM | {"PARALLELISM_CONFIG_DP_SHARD_SIZE": str(ranks // 2)} if kind == "sequence" else {}),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PYTHONPATH": f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
    }
    logs = [folder / f"{name}.{rank}.log" for rank in range(ranks)]
    started = []
    for rank, log in enumerate(logs):
        env = {**everyone, "RANK": str(rank), "LOCAL_RANK": str(rank % gpus)}
        with open(log, "w") as out:
            started.append(subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=SECONDS) for process in started]
    finally:
        for process in started:
            process.kill()
    failed = next((log for log, code in zip(logs, codes) if code), None)
    assert failed is None, f"{kind}, {name}: exit codes {codes}\n" + failed.read_text()[-4000:]


def logged(folder: Path, key: str) -> torch.Tensor:
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return torch.tensor([entry[key] for entry in history if key in entry])


def far(one: Path, other: Path) -> float:
    """The largest difference of a weight that the Trainer has saved."""
    return farthest(*(load_file(folder / "model.safetensors") for folder in (one, other)))


def compared(kind: str, ranks: int, cpu: bool) -> tuple[bool, list[str]]:
    """Whether the jobs of a kind are as they should be, and a line for each comparison."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stock, dp, v2, resumed = (folder / job for job in RULES)
        for job in ("stock", "dp", "cdp-v2"):
            run(folder, kind, job, ranks, cpu)
        checks = {
            "dp's losses as ZeRO-3's": (float((logged(dp, "loss") - logged(stock, "loss")).abs().max()), 1e-4),  # rounded
            "dp's evaluations as ZeRO-3's": (float((logged(dp, "eval_loss") - logged(stock, "eval_loss")).abs().max()), 1e-5),
            "dp's weights as ZeRO-3's": (far(dp, stock), 1e-5),
        }
        if kind != "sequence":
            run(folder, kind, "resumed", ranks, cpu)
            checks["cdp-v2, resumed half-way, weights"] = far(resumed, v2), 0.0
        apart, good, lines = far(v2, dp), True, []
        for what, (value, most) in checks.items():
            good &= value <= most
            lines.append(f"{'ok  ' if value <= most else 'BAD '} {kind}, {ranks} ranks, {what}: {value:.2e}, at most {most:.0e}")
        lines.append(f"     {kind}: cdp-v2's weights are {apart:.2e} from dp's; last losses {logged(v2, 'loss')[-1]:.4f}, ")
        lines[-1] += f"ZeRO-3's {logged(stock, 'loss')[-1]:.4f}"
        return good and apart > 1e-4, lines


def main() -> None:
    new = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    new.add_argument("kinds", nargs="*", default=[], metavar="KIND", help=f"of {', '.join(GROUPS)}; default: all")
    new.add_argument("--ranks", type=int, default=4)
    new.add_argument("--cpu", action="store_true", help="prove the script without GPUs, whose torch has no `sequence` over gloo")
    args = new.parse_args()
    if not args.cpu and args.ranks > torch.cuda.device_count() and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        print("skipped: over nccl every rank needs a GPU")
        return
    kinds, good = args.kinds or list(GROUPS), True
    with ThreadPoolExecutor(len(kinds) if not args.cpu else 1) as pool:
        for job in [pool.submit(compared, kind, args.ranks, args.cpu) for kind in kinds]:
            try:
                passed, lines = job.result()
            except Exception as error:  # the other kinds go on
                passed, lines = False, [f"BAD  {error}"]
            good &= passed
            print("\n".join(lines), flush=True)
    print("passed" if good else "failed", flush=True)
    sys.exit(not good)


if __name__ == "__main__":
    main()
