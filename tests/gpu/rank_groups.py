"""One rank of the GPU checks of what rings combine with: sequence and tensor groups of two, experts, a curriculum.

Under dp a run is compared with stock DeepSpeed's, else with the oracle's. With two ranks rings of groups have one rank, with
four they have two:

    torchrun --nproc-per-node 4 tests/gpu/rank_groups.py [--transport peer|nccl] [--cpu] [CASE ...]
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from support import curriculum_work, engine_work, sequence_work, tensor_work  # noqa: E402
from support.engine_work import farthest, unpack  # noqa: E402
from support.gpu_places import shares_gpu  # noqa: E402
from support.gpu_runs import Verdict  # noqa: E402
from support.rank_tools import Tools, finish, parsed, parser, run_cases  # noqa: E402

LEAST = 5e-5  # parts of a sequence or product are added in another order, and on GPUs than on a CPU; rules differ by more
CLIPPED = {"rounds": 2, "clip": 0.3}


def cyclic_of(tools: Tools) -> dict[str, Any]:
    return {"transport": tools.transport, "timeout_seconds": tools.timeout}


def of_rank_0(value: Any) -> Any:
    """Collective."""
    values = [value]
    torch.distributed.broadcast_object_list(values, 0)
    return values[0]


def verdict(ours: dict[str, Any], losses: dict[Any, float], weights: dict[str, torch.Tensor]) -> Verdict:
    state = unpack(ours["state"])
    figures = {
        "losses": max(abs(loss - losses[place]) / losses[place] for place, loss in ours["losses"].items()),
        "weights": farthest({n: state[n] for n in weights}, weights),
        **{key: ours[key] for key in ("rings", "collectives") if key in ours},
    }
    return max(figures["losses"], figures["weights"]) < LEAST and not ours.get("collectives"), figures


def compared(tools: Tools, work: ModuleType, job: Any, stage: int = 3) -> Verdict:
    """A job of one of the modules that have ``run_jobs`` and ``oracle``.

    Args:
        stage: of stock DeepSpeed.
    """
    job = replace(job, cyclic={**cyclic_of(tools), **job.cyclic})
    if job.rule == "dp":
        stock = replace(job, rule=None, config={"zero_optimization": {"stage": stage}})
        theirs, ours = work.run_jobs(tools.rank, tools.size, [stock, job])
        assert (theirs["class"], ours["class"]) == ("DeepSpeedEngine", "CyclicEngine")
        return verdict(ours, theirs["losses"], unpack(of_rank_0(theirs["state"])))
    (ours,) = work.run_jobs(tools.rank, tools.size, [job])
    want = work.oracle(job, ours["stages"], tools.size)
    return verdict(ours, want.losses, want.masters)


def sequence(rule: str, **options: Any) -> Callable[[Tools], Verdict]:
    return lambda tools: compared(tools, sequence_work, sequence_work.Job(rule, **options))


def tensor(rule: str, **options: Any) -> Callable[[Tools], Verdict]:
    return lambda tools: compared(tools, tensor_work, tensor_work.Job(rule, **options))


def experts(rule: str, **options: Any) -> Callable[[Tools], Verdict]:
    """DeepSpeed's MoE layer with whole experts, which stock DeepSpeed has under stages 0 to 2, in rings of two."""
    job = engine_work.Job("moe", rule, optimizer="sgd", cyclic={"ring_size": 2}, **options)
    return lambda tools: compared(tools, engine_work, job, stage=2)


def curriculum(tools: Tools) -> Verdict:
    """DeepSpeed's curriculum in rings of two: the samples are stock DeepSpeed's."""
    folder = of_rank_0(tempfile.mkdtemp() if tools.rank == 0 else None)
    if tools.rank == 0:
        curriculum_work.analyze(folder)
    tools.agree(True)  # it is written
    cyclic = {**cyclic_of(tools), "ring_size": 2}
    theirs, ours = (curriculum_work.train(tools.rank, tools.size, rule, folder, folder, cyclic=cyclic) for rule in (None, "dp"))
    tools.agree(True)  # all have read
    if tools.rank == 0:
        shutil.rmtree(folder)
    for run in (theirs, ours):
        run["losses"] = dict(enumerate(run["losses"]))
    good, figures = verdict(ours, theirs["losses"], unpack(theirs["state"]))
    figures["samples"] = ours["samples"] == theirs["samples"]
    return good and figures["samples"], figures


CASES: dict[str, Callable[[Tools], Verdict]] = {
    "sequence_dp": sequence("dp", **CLIPPED),
    "sequence_v2": sequence("cdp-v2", optimizer="groups", **CLIPPED),
    "sequence_v1": sequence("cdp-v1", clip=0.3),
    "tensor_dp": tensor("dp", **CLIPPED),
    "tensor_v2": tensor("cdp-v2", optimizer="groups", **CLIPPED),
    "tensor_tied": tensor("cdp-v2", model="tied", clip=0.3, cyclic={"delay_correction": "predict"}),
    "experts_dp": experts("dp", **CLIPPED),
    "experts_v2": experts("cdp-v2", correction="predict", **CLIPPED),
    "curriculum": curriculum,
}


def main() -> None:
    options = parsed(parser(__doc__, 300), CASES, 90)
    if options.transport == "nccl" and shares_gpu() and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        print("skipped: over nccl every rank needs a GPU")
        return
    tools = Tools(options)
    finish(tools, run_cases(tools, options.cases, options.limit))


if __name__ == "__main__":
    main()
