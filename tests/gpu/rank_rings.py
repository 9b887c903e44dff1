"""One rank of the GPU checks of rings of rings and of the warm-up: against the oracle, bitwise between rings, over peer or nccl.

torchrun --nproc-per-node 4 tests/gpu/rank_rings.py [--ring 2] [--transport peer|nccl] [--cpu] [CASE ...]
"""

import hashlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from deepspeed_cdp.analysis import reference  # noqa: E402
from deepspeed_cdp.plan.schedule import threshold  # noqa: E402
from support.engine_work import explicit  # noqa: E402
from support.gpu_runs import LR, STEPS, Verdict, apart, same, steps_of  # noqa: E402
from support.rank_tools import Tools, finish, models, parsed, parser, run_cases  # noqa: E402


def everyone(value: Any, tools: Tools) -> list[Any]:
    """Collective."""
    values: list[Any] = [None] * tools.size
    torch.distributed.all_gather_object(values, value)
    return values


def digest(engine: Any) -> str:
    """Of this rank's masters and their optimizer state."""
    owner, found = engine._runtime.owner, hashlib.sha256()
    for name, master in owner.masters.items():
        state = owner.optimizer.state.get(master, {})
        for tensor in (master.detach(), *(state[k] for k in sorted(state) if isinstance(state[k], torch.Tensor))):
            found.update(name.encode() + tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def against_oracle(
    tools: Tools,
    kind: str = "llama",
    rule: str = "cdp-v2",
    rounds: int = 1,
    clip: float = 0.0,
    warmup: int = 0,
    bf16: bool = False,
    offload: bool = False,
    meddle: Callable[[int], None] = lambda step: None,
) -> Verdict:
    """A run beside the oracle, whose order of sums is the rings'; counted bytes; replicas of a stage are equal bit by bit."""
    ring, dtype = tools.ring, torch.bfloat16 if bf16 else None
    cyclic = {
        "enabled": True,
        "rule": rule,
        "transport": tools.transport,
        "timeout_seconds": tools.timeout,
        "ring_size": ring,
        "warmup_steps": warmup,
    }
    config: dict[str, Any] = {
        "gradient_clipping": clip,
        "gradient_accumulation_steps": rounds,
        "cyclic": cyclic,
        "bf16": {"enabled": bf16},
    }
    if offload:
        config |= {
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        }
    module = models.build(kind)
    engine = tools.engine(module if dtype is None else module.to(dtype), rule, config, LR)
    losses = steps_of(engine, kind, tools.batches(kind, STEPS, rounds, dtype), after=meddle)
    traffic, stages = engine._runtime.counters.traffic(), engine.cyclic_plan.stages
    collectives, metrics = engine._runtime.counters.collectives(), engine.cyclic_metrics
    state = engine.module_state_dict()
    digests = everyone(digest(engine), tools)
    name = engine._transport.name
    tools.destroy(engine)

    def place(x: torch.Tensor) -> torch.Tensor:
        x = x.to(tools.device)
        return x.to(dtype) if dtype is not None and x.is_floating_point() else x

    template = models.build(kind).to(tools.device)
    want = reference.train(
        template if dtype is None else template.to(dtype),
        stages,
        threshold(rule, ring),
        lambda t, m, r: place(models.batch(kind, t, m, r)),
        lambda call, x: models.loss(call, kind, x),
        lambda named: torch.optim.AdamW([p for _, p in named], lr=LR, foreach=True),
        STEPS,
        rounds=rounds,
        clip=clip,
        warmup_steps=warmup,
        rings=tools.size // ring,
        delay_correction=explicit("predict"),  # as cyclic.delay_correction "auto"
    )
    mine = [want.losses[t, m, tools.rank] for t in range(STEPS) for m in range(rounds)]
    figures: dict[str, Any] = apart(
        {"state": {n: state[n] for n in want.masters}, "losses": torch.stack(losses).float()},
        {"state": {n: p.to(state[n].dtype) for n, p in want.masters.items()}, "losses": torch.tensor(mine, device=tools.device)},
    )
    good = figures["weights"] < (4e-3 if bf16 else 1e-6) and figures["losses"] < (1e-3 if bf16 else 2e-6)
    replicas = all(digests[r] == digests[r % ring] for r in range(tools.size))
    right = all(row["counted"] == row["closed form"] for row in traffic.values()) and collectives == 0
    step = metrics["step"]
    mean = None if step is None else sum(v for (t, _, _), v in want.losses.items() if t == step) / (tools.size * rounds)
    loss = mean is None or abs(metrics["loss"] - mean) < (1e-2 if bf16 else 1e-5) * abs(mean)
    figures |= {"replicas equal": replicas, "bytes right, no collective": right, "loss of all rings": loss, "transport": name}
    return good and replicas and right and loss, figures


def synchronized(tools: Tools) -> Verdict:
    """The host waits for its whole device after every step, and frees memory."""

    def meddle(step: int) -> None:
        tools.synchronize()
        if tools.cuda:
            torch.cuda.empty_cache()

    return against_oracle(tools, "llama-tied", "cdp-v2", 2, 0.5, meddle=meddle)


def dawdling(tools: Tools) -> Verdict:
    """Ranks and their devices are late at random."""
    dice = random.Random(tools.rank)

    def meddle(step: int) -> None:
        if tools.cuda and dice.random() < 0.5:
            torch.cuda._sleep(int(dice.random() * 60_000_000))
        elif dice.random() < 0.5:
            time.sleep(0.03 * dice.random())

    return against_oracle(tools, "llama", "cdp-v2", 1, 0.0, meddle=meddle)


def save_load(tools: Tools) -> Verdict:
    """Save under rings, go on, load, go on: the same twice; then one ring of all ranks reads it."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
    folder = os.path.join(tempfile.gettempdir(), f"cyclic-rings-{os.environ['MASTER_PORT']}-{run_id}")

    def config(ring: int) -> dict[str, Any]:
        return {
            "cyclic": {
                "enabled": True,
                "rule": "cdp-v2",
                "transport": tools.transport,
                "timeout_seconds": tools.timeout,
                "ring_size": ring,
            }
        }

    data, ends = tools.batches("llama", STEPS), []
    engine = tools.engine(models.build("llama"), "cdp-v2", config(tools.ring), LR)
    steps_of(engine, "llama", data, 0, 3)
    engine.save_checkpoint(folder, "t")
    saved = engine.module_state_dict()
    for attempt in range(2):
        if attempt:
            engine.load_checkpoint(folder, "t")
        losses = torch.stack(steps_of(engine, "llama", data, 3))
        ends.append({"losses": losses, "state": engine.module_state_dict()})
    tools.destroy(engine)
    engine = tools.engine(models.build("llama"), "cdp-v2", config(tools.size), LR)
    engine.load_checkpoint(folder, "t")
    state = engine.module_state_dict()
    tools.destroy(engine)
    tools.agree(True)
    if tools.rank == 0:
        shutil.rmtree(folder)
    figures = {"loaded": same(*ends), "one ring": all(torch.equal(v, state[k]) for k, v in saved.items())}
    return all(figures.values()), figures


CASES: dict[str, Callable[[Tools], Verdict]] = {
    "v2": lambda tools: against_oracle(tools, "llama-tied", "cdp-v2"),
    "v2_clip_accumulate": lambda tools: against_oracle(tools, "llama-tied", "cdp-v2", 2, 0.3),
    "v1_clip": lambda tools: against_oracle(tools, "llama", "cdp-v1", 1, 0.3),
    "dp_clip": lambda tools: against_oracle(tools, "mlp", "dp", 1, 0.3),
    "bf16": lambda tools: against_oracle(tools, "llama", "cdp-v2", bf16=True),
    "offload": lambda tools: against_oracle(tools, "llama", "cdp-v2", 1, 0.3, offload=True),
    "warmup_v2": lambda tools: against_oracle(tools, "llama-tied", "cdp-v2", 1, 0.3, warmup=3),
    "warmup_v1": lambda tools: against_oracle(tools, "llama", "cdp-v1", 2, warmup=2),
    "synchronized": synchronized,
    "dawdling": dawdling,
    "save_load": save_load,
}


def main() -> None:
    arguments = parser(__doc__, 300)
    arguments.add_argument("--ring", type=int, default=2, help="ranks per ring")
    options = parsed(arguments, CASES, 90)
    tools = Tools(options)
    tools.ring = options.ring
    finish(tools, run_cases(tools, options.cases, options.limit))


if __name__ == "__main__":
    main()
