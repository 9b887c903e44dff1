"""One rank of the endurance check: hundreds of steps with random delays and synchronizes equal the undisturbed run, bitwise.

Started by tests/gpu/test_gpu.py, or by hand: torchrun --nproc-per-node N tests/gpu/rank_stress.py [--steps 500] [--always-sync]
"""

import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from support.rank_tools import Tools, disturb, finish, models, parser  # noqa: E402

SETTLED = 50  # steps after which nothing may grow
# bytes, open files and threads by which a figure may differ all the same: allocators round, pools fill
ROOM = {"allocated": 1 << 16, "reserved": 4 << 20, "gpu": 16 << 20, "rss": 24 << 20, "fds": 2, "threads": 2}


def run(tools: Tools, name: str, steps: int, how: str, options: Any) -> dict[str, Any]:
    """Train; the final weights, all losses, the memory at ten points.

    Args:
        how: "calm", "random" (disturbed at random), or "always" (synchronize, read and empty the cache in every step).
    """
    engine = tools.engine(models.build(options.model), options.rule)
    batches, chance, samples = tools.batches(options.model, steps), random.Random(tools.rank), []
    losses = torch.zeros(steps, device=tools.device)  # made before, for what a run allocates is watched
    begun = last = time.monotonic()
    for step in range(steps):
        loss = models.loss(engine, options.model, batches[step, 0])
        if how == "always":
            loss.item()
        engine.backward(loss)
        if how == "random":
            disturb(tools, chance, loss)
        engine.step()
        losses[step].copy_(loss.detach())
        if how == "random":
            disturb(tools, chance, loss)
        if how == "always":
            tools.synchronize()
            loss.item()
            if tools.cuda:
                torch.cuda.empty_cache()
        if step >= SETTLED and (step - SETTLED) % max((steps - SETTLED) // 10, 1) == 0:
            samples.append(tools.memory())
        if options.progress and (step + 1) % 50 == 0:
            now = time.monotonic()
            tools.say(f"{name}: step {step + 1}, {50 / (now - last):.1f} steps/s on the host")
            last = now
    tools.synchronize()
    seconds = time.monotonic() - begun
    state = {k: v.clone() for k, v in engine.module_state_dict().items()}
    tools.destroy(engine)
    tools.synchronize()
    tools.say(f"{name}: {steps} steps in {seconds:.1f} s, {steps / seconds:.1f} steps/s")
    return {"state": state, "losses": losses, "samples": samples}


def growth(samples: list[dict[str, int]]) -> dict[str, int]:
    """By figure: how much the last third of the samples is above the first third, at the least."""
    third = max(len(samples) // 3, 1)
    return {k: min(s[k] for s in samples[-third:]) - max(s[k] for s in samples[:third]) for k in samples[0]} if samples else {}


def main() -> None:
    arguments = parser(__doc__, 600)
    arguments.add_argument("--steps", type=int, default=500)
    arguments.add_argument("--progress", action="store_true", help="steps/s every 50 steps")
    arguments.add_argument("--always-sync", action="store_true", help="synchronize, item() and empty_cache() in every step")
    arguments.add_argument("--model", default="llama")
    arguments.add_argument("--rule", default="cdp-v2")
    arguments.add_argument("--limit", type=float, default=240, help="seconds for one run")
    options = arguments.parse_args()
    tools = Tools(options)
    how = "always" if options.always_sync else "random"
    with tools.limit("warm-up", options.limit):
        run(tools, "warm-up", 2, "calm", options)  # loads kernels, so that the runs differ in nothing
    with tools.limit("undisturbed", options.limit):
        calm = run(tools, "undisturbed", options.steps, "calm", options)
    before = tools.settled_memory()
    with tools.limit(how, options.limit):
        wild = run(tools, f"disturbed ({how})", options.steps, how, options)
    after = tools.settled_memory()
    equal = all(torch.equal(calm["state"][n], wild["state"][n]) for n in calm["state"])
    losses = torch.equal(calm["losses"], wild["losses"])
    finite = bool(torch.isfinite(calm["losses"]).all())
    grown = {name: growth(out["samples"]) for name, out in (("undisturbed", calm), (how, wild))}
    grown["second engine"] = {
        k: after[k] - before[k] - (sum(v.numel() * v.element_size() for v in wild["state"].values()) if k == "allocated" else 0)
        for k in after
    }
    # gloo closes its sockets late; rank_cases.py counts what many engines leave behind
    room = {"second engine": {**ROOM, "fds": 8}}
    bad = [f"{name} {k} {v}" for name, figures in grown.items() for k, v in figures.items() if v > room.get(name, ROOM)[k]]
    print(
        f"rank {tools.rank}: weights equal bitwise: {equal}; losses: {losses}; finite: {finite}; growth {grown}; "
        f"too much: {bad or 'nothing'}",
        file=sys.stderr,
        flush=True,
    )
    with tools.limit("the verdict", 60):
        good = tools.agree(equal and losses and finite and not bad)
        tools.say(
            f"{options.steps} steps, {tools.size} ranks: disturbed ({how}) equals undisturbed bitwise: {equal and losses}; "
            f"growth: {grown}"
        )
        finish(tools, good)


if __name__ == "__main__":
    main()
