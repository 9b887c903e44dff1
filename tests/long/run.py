"""The long run: thousands of disturbed steps, evaluations, saves, one rank killed and all resumed, against an undisturbed run.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else torch 2.13 lets restarted ranks read the addresses of those before
    torchrun --standalone --nproc-per-node 2 --max-restarts 1 tests/long/run.py --cpu --steps 5000 --out FOLDER
    torchrun --standalone --nproc-per-node 4 --max-restarts 1 tests/long/run.py --minutes 20 --out FOLDER

First an undisturbed run, then one in which every rank sleeps, synchronizes and reads at random, and in whose middle the last
rank kills itself with SIGKILL; torchrun starts all ranks anew and they go on from the last checkpoint. Both evaluate and save
after the same steps, so they flush alike. At every save the losses so far must be equal bit by bit. Passed, if at the end the
last checkpoints (masters, moments, norms, buffers) are too, and neither memory nor open files nor threads have grown. FOLDER
gets samples.csv and summary.json.

Where no machine is had for so long, ``--parts calm`` leaves what the other run is compared with in FOLDER (small files,
calm*), and ``--parts wild --out`` the same FOLDER, or a copy of these files, does the rest another time, or at the same time on
other GPUs (with the same ``--steps``): it compares what both have saved, and in the end waits for the undisturbed run.
"""

import csv
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from support.rank_tools import Tools, disturb, finish, models, parser  # noqa: E402

BATCHES = 997  # different ones, used over and over
# What may come and go without being growth: allocators' pools, a thread that ends a little later.
ROOM = {"allocated": 1 << 16, "reserved": 8 << 20, "gpu": 16 << 20, "rss": 8 << 20, "fds": 2, "threads": 2}


class Run:
    """One of the two runs, on one rank."""

    def __init__(self, tools: Tools, options: Any, name: str, steps: int, out: Path):
        self.tools, self.options, self.name, self.steps = tools, options, name, steps
        self.checkpoints, self.losses_file = out / "work" / name, out / f"{name}_losses_{tools.rank}.pt"
        self.samples = out / f"{name}_samples_{tools.rank}.csv"
        self.killed, self.attempt = out / "killed", int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        self.wanted: Path | None = None  # where the losses are that these must equal
        self.losses = torch.zeros(steps, dtype=torch.float32)

    def train(self) -> float:
        """From the last checkpoint, if there is one, to the end; seconds."""
        tools, options, wild = self.tools, self.options, self.name == "wild"
        engine = tools.engine(models.build(options.model), options.rule)
        if (self.checkpoints / "latest").exists():
            path, _ = engine.load_checkpoint(str(self.checkpoints))
            self.losses = torch.load(self.losses_file, weights_only=True)
            tools.say(f"{self.name}: goes on from {path}, step {engine.global_steps}")
        batches, began = tools.batches(options.model, BATCHES), time.monotonic()
        first = engine.global_steps
        device_losses = torch.zeros(options.save, device=tools.device)  # a list of them would look like growth
        for step in range(engine.global_steps, self.steps):
            chance = random.Random(10**6 * tools.rank + step)
            loss = models.loss(engine, options.model, batches[step % BATCHES, 0])
            if wild and step == self.steps // 2 + 3 and not self.killed.exists() and tools.rank == tools.size - 1:
                self.killed.write_text(str(step))
                os.kill(os.getpid(), signal.SIGKILL)
            if wild:
                disturb(tools, chance, loss)
            engine.backward(loss)
            engine.step()
            device_losses[step - first] = loss.detach()
            if wild:
                disturb(tools, chance, loss)
            if step % options.sample == options.sample - 1:
                self._sample(step, began)
            if step % options.evaluate == options.evaluate - 1:
                self._evaluate(engine, batches)
            if step % options.save == options.save - 1 or step == self.steps - 1:
                self.losses[first : step + 1] = device_losses[: step + 1 - first].cpu()
                first = step + 1
                self._save(engine, step)
                self._compare(step + 1)
        tools.synchronize()
        tools.destroy(engine)
        return time.monotonic() - began

    def _evaluate(self, engine: Any, batches: torch.Tensor) -> None:
        """Ranks run different numbers of batches."""
        engine.eval()
        with torch.no_grad():
            for i in range(self.tools.rank + 1):
                models.loss(engine, self.options.model, batches[i, 0])
        engine.train()

    def _save(self, engine: Any, step: int) -> None:
        """Keeps the last two, and this rank's losses up to here."""
        torch.save(self.losses, self.losses_file.with_suffix(".new"))
        os.replace(self.losses_file.with_suffix(".new"), self.losses_file)
        engine.save_checkpoint(str(self.checkpoints), tag=f"step{step + 1}")
        if self.tools.rank == 0:
            old = sorted(self.checkpoints.glob("step*"), key=lambda p: int(p.name[4:]))[:-2]
            for folder in old:
                shutil.rmtree(folder)

    def _compare(self, steps: int) -> None:
        """As far as the undisturbed run has saved losses, should it still be under way; those to come are zeros."""
        if self.wanted is not None:
            wanted = torch.load(self.wanted, weights_only=True) if self.wanted.exists() else torch.zeros(self.steps)
            known = min(steps, int(wanted.count_nonzero()))
            equal = self.tools.agree(torch.equal(self.losses[:known], wanted[:known]))
            self.tools.say(f"{self.name}: {steps} of {self.steps} steps, losses of {known} {'equal' if equal else 'DIFFERENT'}")
            assert equal, f"the losses of the first {steps} steps differ from the undisturbed run's"

    def _sample(self, step: int, began: float) -> None:
        figures = {
            "run": self.name,
            "attempt": self.attempt,
            "rank": self.tools.rank,
            "step": step + 1,
            "seconds": round(time.monotonic() - began, 2),
            **self.tools.memory(),
        }
        new = not self.samples.exists()
        with self.samples.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(figures), lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(figures)


def growth(values: list[float]) -> tuple[float, float]:
    """How far the median of the last third of the samples lies above that of the first third, and three standard errors of that
    (from the median absolute deviation inside the two thirds; a median's error is 1.25 times a mean's)."""
    third = max(len(values) // 3, 1)
    first, last = values[:third], values[-third:]
    middle = statistics.median(first), statistics.median(last)
    spread = 1.4826 * statistics.median([abs(v - m) for part, m in zip((first, last), middle) for v in part])
    return middle[1] - middle[0], 3 * 1.2533 * spread * (2 / third) ** 0.5


def judge(rows: list[dict[str, str]], settled: int) -> tuple[dict[str, Any], list[str]]:
    """Growth by run, attempt, rank and figure, and what has grown beyond error and room. ``settled``: steps left out at first."""
    groups: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for row in rows:
        groups.setdefault((row["run"], row["attempt"], row["rank"]), []).append(row)
    told, grown = {}, []
    for key, group in groups.items():
        group = [r for r in group if int(r["step"]) >= int(group[0]["step"]) + settled]
        for figure in ROOM:
            if len(group) >= 6 and figure in group[0]:
                up, error = growth([float(r[figure]) for r in group])
                told[" ".join(("{} attempt {} rank {}".format(*key), figure))] = {
                    "grown": up,
                    "error": round(error, 1),
                    "samples": len(group),
                }
                if up - error > ROOM[figure]:
                    grown.append(f"{key} {figure}: by {up:.0f} +- {error:.0f}")
    return told, grown


def digests(checkpoint: Path) -> dict[str, str]:
    """SHA-256 of every tensor's bytes (masters, moments, norms and buffers) by file and name."""
    return {
        f"{file.name} {name}": hashlib.sha256(x.reshape(-1).contiguous().view(torch.uint8).numpy()).hexdigest()
        for file in sorted(checkpoint.glob("*.safetensors"))
        for name, x in sorted(load_file(file).items())
    }


def count_steps(tools: Tools, options: Any, out: Path) -> int:
    """As many as the undisturbed run has made; else ``--steps``, or as many as fit into ``--minutes``, the same on all ranks and
    after a restart."""
    if (out / "calm.json").exists():
        return json.loads((out / "calm.json").read_text())["steps"]
    if not options.minutes:
        return options.steps
    import torch.distributed as dist

    known = out / "work" / "steps"
    if known.exists():
        return int(known.read_text())
    engine = tools.engine(models.build(options.model), options.rule)
    batches, chance = tools.batches(options.model, 120), random.Random(tools.rank)
    for step in range(120):
        if step == 40:
            tools.synchronize()
            began = time.monotonic()
        loss = models.loss(engine, options.model, batches[step, 0])
        disturb(tools, chance, loss)
        engine.backward(loss)
        engine.step()
        disturb(tools, chance, loss)
    engine.flush()
    tools.synchronize()
    each = (time.monotonic() - began) / 80
    tools.destroy(engine)
    told: list[Any] = [max(int(options.minutes * 60 / (2 * each)) // options.save, 2) * options.save]
    dist.broadcast_object_list(told, 0)
    if tools.rank == 0:
        known.write_text(str(told[0]))
    return told[0]


def calm(tools: Tools, options: Any, steps: int, out: Path) -> None:
    """The undisturbed run, unless it is there; what the other one is compared with goes to calm.json."""
    if (out / "calm.json").exists():
        return
    seconds = Run(tools, options, "calm", steps, out).train()
    if tools.rank == 0:
        told = {
            **settings(tools, options),
            "steps": steps,
            "seconds": round(seconds, 1),
            "digests": digests(out / "work" / "calm" / f"step{steps}"),
        }
        (out / "calm.new").write_text(json.dumps(told, indent=1) + "\n")
        os.replace(out / "calm.new", out / "calm.json")
    tools.agree(True)  # it is there for all
    tools.say(f"calm: {steps} steps in {seconds:.1f} s")


def settings(tools: Tools, options: Any) -> dict[str, Any]:
    """What the two runs must share."""
    return {
        "ranks": tools.size,
        "model": options.model,
        "rule": options.rule,
        "save every": options.save,
        "evaluate every": options.evaluate,
        "device": torch.cuda.get_device_name() if tools.cuda else "CPU",
        "torch": torch.__version__,
    }


def undisturbed(tools: Tools, options: Any, steps: int, out: Path) -> dict[str, Any]:
    """What ``calm`` has left in calm.json.

    Raises:
        ValueError: it was not the same job.
    """
    known = json.loads((out / "calm.json").read_text())
    for key, value in {**settings(tools, options), "steps": steps}.items():
        if known[key] != value:
            raise ValueError(f"{key}: {value!r}, but the undisturbed run in {out} had {known[key]!r}; give both the same")
    return known


def wild(tools: Tools, options: Any, steps: int, out: Path) -> bool:
    """The disturbed run against what ``calm`` has left; whether it passed, on rank 0 with a summary."""
    if (out / "calm.json").exists():
        undisturbed(tools, options, steps, out)
    run = Run(tools, options, "wild", steps, out)
    run.wanted = out / f"calm_losses_{tools.rank}.pt"
    seconds = run.train()
    while not (out / "calm.json").exists():  # under way beside this run, or --budget ends the waiting
        time.sleep(1)
    known = undisturbed(tools, options, steps, out)
    wanted = torch.load(run.wanted, weights_only=True)
    equal = torch.equal(run.losses, wanted) and bool(torch.isfinite(run.losses).all()) and bool((run.losses != 0).all())
    mine = digests(out / "work" / "wild" / f"step{steps}")
    equal = tools.agree(equal and bool(mine) and mine == known["digests"])
    if tools.rank:
        return equal
    rows = [
        r
        for name in ("calm", "wild")
        for rank in range(tools.size)
        for r in csv.DictReader((out / f"{name}_samples_{rank}.csv").open(newline=""))
    ]
    told, grown = judge(rows, options.save)
    with (out / "samples.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    killed, restarts = run.killed.read_text() if run.killed.exists() else "", run.attempt
    good = equal and not grown and bool(killed) and restarts == 1
    summary = {
        "passed": good,
        "steps": steps,
        **settings(tools, options),
        "equal bitwise": equal,
        "killed in step": killed,
        "restarts": restarts,
        "grown": grown,
        "seconds of the undisturbed run": known["seconds"],
        "seconds of the disturbed run after the restart": round(seconds, 1),
        "growth": told,
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    tools.say(json.dumps({k: v for k, v in summary.items() if k != "growth"}))
    return good


def main() -> None:
    arguments = parser(__doc__, 3600)
    arguments.add_argument("--steps", type=int, default=5000, help="of each of the two runs")
    arguments.add_argument("--minutes", type=float, default=0, help="instead: for both runs together, about")
    arguments.add_argument("--save", type=int, default=250, help="steps from one save to the next")
    arguments.add_argument("--evaluate", type=int, default=100)
    arguments.add_argument("--sample", type=int, default=20)
    arguments.add_argument("--model", default="mlp")
    arguments.add_argument("--rule", default="cdp-v2")
    arguments.add_argument("--parts", default="both", choices=("both", "calm", "wild"))
    arguments.add_argument("--out", required=True, help="a new folder, or for --parts wild that of the undisturbed run")
    options = arguments.parse_args()
    tools, out = Tools(options), Path(options.out)
    (out / "work").mkdir(parents=True, exist_ok=True)
    with tools.limit("the long run", options.budget):
        steps, good = count_steps(tools, options, out), True
        if options.parts != "wild":
            calm(tools, options, steps, out)
        if options.parts != "calm":
            good = wild(tools, options, steps, out)
        finish(tools, tools.agree(good))


if __name__ == "__main__":
    main()
