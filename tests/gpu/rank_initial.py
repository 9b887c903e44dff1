"""Memory of a rank while an engine is made from a model that no rank holds whole: zero.Init, or meta with a folder of weights.

    torchrun --nproc-per-node N tests/gpu/rank_initial.py zero.Init|meta|whole [--model llama-1.3b]

Says per rank, in units of the model's bytes: the peak of torch's allocator until two steps were trained, what of it is masters
and Adam's moments, what lies outside it (buffers that peers write into), and the host's peak. "whole" is there to compare with.
"""

import resource
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
from benchmarks import models, samples  # noqa: E402
from benchmarks.sizes import SIZES  # noqa: E402
from support.rank_tools import Tools, finish, parser  # noqa: E402


def made(tools: Tools, how: str, config: Any, settings: dict[str, Any]) -> torch.nn.Module:
    import deepspeed

    if how == "zero.Init":
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model = models.build(config, tools.device, torch.bfloat16)
        models.randomize([(p, p.ds_tensor) for p in model.parameters()], tools.rank)
        return model
    return models.build(config, torch.device("meta") if how == "meta" else tools.device, torch.bfloat16)


def stage_numel(engine: Any) -> list[int]:
    sizes = {n: getattr(p, "ds_numel", p.numel()) for n, p in engine.module.named_parameters()}
    return [sum(sizes[n] for n in stage) for stage in engine.cyclic_plan.stages]


def measure(tools: Tools, how: str, config: Any, folder: Path) -> bool:
    import deepspeed

    cyclic: dict[str, Any] = {"enabled": True, "transport": tools.transport, "timeout_seconds": 60}
    if how == "meta":
        cyclic["weights"] = str(folder)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "cyclic": cyclic,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
    }
    before = tools.settled_memory()
    host_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if tools.cuda:
        torch.cuda.reset_peak_memory_stats()
    model = made(tools, how, config, settings)
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0]
    tools.engines.append(engine)
    (batch,) = samples.alike(config, 1, 128, 1, tools.rank, tools.device)
    for _ in range(2):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
    engine.flush()
    tools.synchronize()
    after, stages = tools.memory(), stage_numel(engine)
    model_bytes = 2 * sum(stages)
    figures = {
        "masters and moments": 12 * stages[tools.size - 1 - tools.rank],
        "host's peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - host_before,
    }
    if tools.cuda:
        figures |= {
            "torch's peak": torch.cuda.max_memory_allocated() - before["allocated"],
            "outside torch": after["gpu"] - after["reserved"] - (before["gpu"] - before["reserved"]),
        }
    told = ", ".join(f"{name} {value / model_bytes:.2f}" for name, value in figures.items())
    print(f"{how}, rank {tools.rank}: of a model of {model_bytes / 2**30:.2f} GiB: {told}", flush=True)
    tools.destroy(engine)
    return bool(torch.isfinite(loss))


def main() -> None:
    arguments = parser(__doc__, 200)
    arguments.add_argument("how", choices=("zero.Init", "meta", "whole"))
    arguments.add_argument("--model", default="llama-1.3b", choices=SIZES)
    options = arguments.parse_args()
    tools, config = Tools(options), models.configuration(options.model)
    folder = Path(tempfile.gettempdir()) / f"rank_initial_{options.model}"
    if tools.rank == 0 and options.how == "meta" and not folder.exists():
        folder.mkdir()
        with torch.no_grad():
            state = models.build(config, tools.device, torch.bfloat16).state_dict()
        save_file({n: v.cpu().contiguous() for n, v in state.items()}, folder / "model.safetensors")
    tools.agree(True)
    with tools.limit(options.how, 90):
        good = tools.agree(measure(tools, options.how, config, folder))
    if tools.rank == 0 and options.how == "meta":
        shutil.rmtree(folder)
    finish(tools, good)


if __name__ == "__main__":
    main()
