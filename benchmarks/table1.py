"""The paper's Table 1, measured: its nine systems train for a few steps on CPU processes; results stand beside the closed forms.

    python -m benchmarks.table1 --stages 3 4 --out benchmarks/results/DATE_cpu_table1/rows.csv     # runs them, 1 to N^2 processes
    python -m benchmarks.table1 --write                                                           # the table of docs/table1.md

The model has N equal stages of two linear layers and a tanh, so a stage saves two tensors for its backward and passes one on.
The loss is a mean, which saves nothing. ``benchmarks.watch`` measures:

- *activations*: the most bytes of tensors saved by autograd at any time of the steady steps, on the device with the most;
- *parameters*: bytes of all memory with parameters (versions, published copies, messages in flight), on the device with the most;
- *volume*: bytes received in a steady step by the device with the most. A collective counts the bytes that a rank receives,
  and an all-reduce counts twice, as in the closed forms (the wire carries (N-1)/N of it);
- *steps*: the longest chain of operations between two time steps (``benchmarks.rounds``), without those of up to ``SCALARS``
  bytes (a loss, norms); ``all_...`` includes them.
"""

import argparse
import contextlib
import csv
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.processes import spawn
from benchmarks.rounds import Event, longest
from benchmarks.watch import Live, Log
from deepspeed_cdp.analysis.paper_costs import Cost, Sizes, table
from deepspeed_cdp.plan.interval_alloc import aligned
from deepspeed_cdp.plan.plan import Plan

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "table1.md"
BLOCK = re.compile(r"(<!-- rows: (\S+), N = (\d+) -->\n\n).*?\n\n", re.DOTALL)
WIDTH, ROWS = 48, 8  # parts of every parameter for 2, 3 or 4 ranks, and whole ones, need no padding
WARM, STEPS = 3, 6
SCALARS = 512


class _Begin(torch.autograd.Function):
    """Calls ``tell`` when a backward begins."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, tell: Callable[[], None]) -> Tensor:
        ctx.tell = tell
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.tell()
        return grad, None


class Stage(nn.Module):
    """A stage that saves its input and one inner tensor, (rows, width) each.

    Attributes:
        tell: called when a pass begins.
    """

    def __init__(self, width: int):
        super().__init__()
        self.up, self.down, self.tell = nn.Linear(width, width), nn.Linear(width, width), lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.tell()
        return _Begin.apply(self.down(torch.tanh(self.up(x))), self._backward_begins)

    def _backward_begins(self) -> None:
        self.tell()


class Net(nn.Module):
    """The stages in sequence."""

    def __init__(self, stages: int, width: int):
        super().__init__()
        self.stages = nn.ModuleList(Stage(width) for _ in range(stages))

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x.mean()


def sizes(n: int) -> Sizes:
    """The sizes of the model above in fp32, for the closed forms."""
    return Sizes(n, psi_p=n * 2 * 4 * (WIDTH * WIDTH + WIDTH), psi_a=n * 2 * 4 * ROWS * WIDTH, psi_int=4 * ROWS * WIDTH)


@dataclass(frozen=True)
class System:
    """The system of a row.

    Attributes:
        words: for people; cyclic: this package's engine, else DeepSpeed's own; zero: the ZeRO stage.
        pipe: a PipelineModule; placement: of its stages; together: the N micro-batches are computed as one.
    """

    words: str
    cyclic: bool = False
    zero: int = 0
    pipe: bool = False
    placement: str = "auto"
    together: bool = False


SYSTEMS = {
    "2.a.i": System("DeepSpeed, ZeRO stage 0, N micro-batches as one", together=True),
    "2.a.ii": System("cyclic pipeline, `single`", cyclic=True, pipe=True, placement="single"),
    "2.b.i": System("DeepSpeed, ZeRO stage 0"),
    "2.b.ii": System("cyclic, ZeRO stage 0", cyclic=True),
    "2.c.i": System("DeepSpeed PipelineEngine, N pipelines of one micro-batch each", pipe=True),
    "2.c.ii": System("cyclic pipeline, `pyramid`", cyclic=True, pipe=True, placement="pyramid"),
    "2.c.iii": System("cyclic pipeline, `pipeline`", cyclic=True, pipe=True, placement="pipeline"),
    "2.d.i": System("DeepSpeed, ZeRO stage 3", zero=3),
    "2.d.ii": System("cyclic, ZeRO stage 3", cyclic=True, zero=3),
}


def cost(figure: str, n: int) -> Cost:
    """The row's closed forms."""
    return next(c for c in table(sizes(n)) if c.figure == figure)


# ---- one rank ---------------------------------------------------------------------------------------------------------------
def start(system: System, n: int) -> Any:
    """The engine, started as a script does it."""
    import deepspeed

    import deepspeed_cdp

    deepspeed_cdp.register()
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS * (n if system.together else 1),
        "steps_per_print": None,
        "gradient_clipping": 0.0,
        "gradient_accumulation_steps": n if system.pipe and system.cyclic else 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": system.zero},
        "zero_allow_untested_optimizer": True,
    }
    if system.zero == 3 and not system.cyclic:  # gather a stage for each pass and let go of it, as the paper has it
        config["zero_optimization"] |= {
            f"stage3_{key}": 0
            for key in ("param_persistence_threshold", "max_reuse_distance", "max_live_parameters", "prefetch_bucket_size")
        }
    if system.cyclic:
        config["cyclic"] = {
            "enabled": True,
            "rule": "cdp-v2",
            "timeout_seconds": 60,
            **({"placement": system.placement} if system.pipe else {"units": [f"stages.{s}" for s in range(n)]}),
        }
    module: nn.Module = Net(n, WIDTH)
    deepspeed.utils.set_z3_leaf_modules(module, [Stage])
    if system.pipe:
        from deepspeed.pipe import LayerSpec, PipelineModule

        from deepspeed_cdp.integration.pipe_module import pyramid_topology

        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        place = {"topology": pyramid_topology(n)} if system.placement == "pyramid" else {"num_stages": n}
        module = PipelineModule([LayerSpec(Stage, WIDTH) for _ in range(n)], loss_fn=_mean, partition_method="uniform", **place)
    return deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)[0]


def _mean(outputs: Tensor, labels: Tensor) -> Tensor:
    return outputs.mean()


def parameter_bytes(engine: Any) -> int:
    """Bytes of this rank's memory that hold parameters now."""
    runtime = getattr(engine, "_runtime", None)
    if hasattr(engine, "cyclic_plan"):  # regions of the message buffers: in flight, persistent, published, replicas
        regions = runtime.executor.buffers.regions
        whole = sum(t.numel() for name, t in regions.items() if name[0] in "HVRL")
        return whole + (_in_flight(engine.cyclic_plan) if "PG" in regions else 0)
    if runtime is not None:
        return sum(flat.numel() for unit in runtime.units.values() for flat in unit.flats)
    parameters = list(engine.module.parameters())
    storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in parameters}
    return sum(storages.values()) + sum(p.ds_tensor.numel() * p.element_size() for p in parameters if hasattr(p, "ds_tensor"))


def _in_flight(plan: Plan) -> int:
    """Bytes of the in-flight buffer that ever hold parameters; the other bytes hold gradient sums only."""
    total = end = 0
    for at, nbytes in sorted((at, aligned(plan.units[i].p_bytes)) for (i, _), at in plan.windows.params.items()):
        total += max(at + nbytes - max(at, end), 0)
        end = max(end, at + nbytes)
    return total


def steps_of(engine: Any, system: System, n: int, rank: int) -> Iterator[None]:
    """Train step by step on new data."""
    generator = torch.Generator().manual_seed(rank)

    def rows(count: int) -> Tensor:
        return torch.randn(count, WIDTH, generator=generator)

    while True:
        if system.pipe:
            engine.train_batch(iter([(rows(ROWS), rows(ROWS)) for _ in range(engine.gradient_accumulation_steps())]))
        else:
            inputs = rows(ROWS * (n if system.together else 1))
            engine.backward(engine(inputs.requires_grad_()))  # else ZeRO-3 lets go of the first stage before its backward
            engine.step()
        yield


def watch(rank: int, world: int, figure: str, n: int) -> dict[str, Any]:
    """Train a row's system on this rank, in an initialized world; returns the measurements."""
    system = SYSTEMS[figure]
    engine = start(system, n)
    log, parameters = Log(), [0]

    def weigh() -> None:
        parameters[0] = max(parameters[0], parameter_bytes(engine))

    live = Live(engine.module.parameters(), weigh)
    if system.cyclic:
        (log.follow_pipe if system.pipe else log.follow_ring)(engine._runtime)
    else:
        for stage in engine.module.modules():
            if isinstance(stage, Stage):
                stage.tell = log.next_pass
    training = steps_of(engine, system, n, rank)
    with live.hooks(), nullcontext() if system.cyclic else log.operators():
        for _ in range(WARM):
            next(training)
        since, begun, live.most, parameters[0] = log.at + 1, len(log.events), live.live, 0
        for _ in range(STEPS):
            next(training)
    received = [e.nbytes for e in log.events[begun:] if e.kind != "push"]
    seen = {
        "activations": live.most,
        "parameters": parameters[0],
        "volume": sum(received) / STEPS,
        "scalars": sum(x for x in received if x <= SCALARS) / STEPS,
        "since": since,
        "events": list(map(tuple, log.events)),
    }
    if hasattr(engine, "flush"):
        engine.flush()
    assert live.live == 0, "autograd has freed all saved tensors"
    engine.destroy()
    return seen


# ---- rows -------------------------------------------------------------------------------------------------------------------
FIELDS = (
    "figure",
    "n",
    "rank",
    "devices",
    "activations",
    "parameters",
    "volume",
    "scalars",
    "rounds",
    "handoffs",
    "collectives",
    "all_handoffs",
    "all_collectives",
    "psi_p",
    "psi_a",
    "psi_int",
    "torch",
    "deepspeed",
)


def rows_of(figure: str, n: int, seen: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A system's rows, one per rank; the longest chain is of all of them together.

    Args:
        seen: what ``watch`` returned, by rank.
    """
    logs = [[Event(*e) for e in x["events"]] for x in seen]
    since, common = [x["since"] for x in seen], SYSTEMS[figure].cyclic
    chain, whole = longest(logs, since, common, least=SCALARS + 1), longest(logs, since, common)
    s = sizes(n)
    return [
        {
            "figure": figure,
            "n": n,
            "rank": rank,
            "devices": len(seen),
            **{key: x[key] for key in ("activations", "parameters", "volume", "scalars")},
            **chain._asdict(),
            "all_handoffs": whole.handoffs,
            "all_collectives": whole.collectives,
            "psi_p": s.psi_p,
            "psi_a": s.psi_a,
            "psi_int": s.psi_int,
        }
        for rank, x in enumerate(seen)
    ]


def most(rows: Sequence[dict[str, Any]], figure: str, n: int) -> dict[str, float]:
    """The maximum of each quantity over ranks, of rows from ``rows_of`` or, as text, from a file."""
    mine = [r for r in rows if (r["figure"], int(r["n"])) == (figure, n)]
    return {key: max(float(r[key]) for r in mine) for key in FIELDS[3:13]}


def markdown(rows: Sequence[dict[str, Any]], n: int) -> str:
    """The nine rows for N = n; each cell has the closed form, its value and the measurement."""
    s = sizes(n)
    lines = [
        "| Figure 2 | system | run as | devices | activations, in Ψ_A | parameters, in Ψ_P | received per step, in Ψ_P | "
        "between two time steps |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for c in table(s):
        m = most(rows, c.figure, n)
        values = {
            "devices": f"{c.devices}",
            "steps": f"{c.steps}",
            "activations": _of(c.activations, s.psi_a),
            "parameters": _of(c.parameters, s.psi_p),
            "volume": _of(c.volume, s.psi_p),
        }
        seen = {
            "devices": f"{m['devices']:.0f}",
            "steps": _chain(m),
            "activations": _of(m["activations"], s.psi_a),
            "parameters": _of(m["parameters"], s.psi_p),
            "volume": _of(m["volume"], s.psi_p),
        }
        cells = []
        for key in ("devices", "activations", "parameters", "volume", "steps"):
            form = c.forms[key].replace("Psi", "Ψ")
            cells.append((form if form == values[key] else f"{form} = {values[key]}") + f" → **{seen[key]}**")
        lines.append("| " + " | ".join([c.figure, c.implementation, SYSTEMS[c.figure].words, *cells]) + " |")
    return "\n".join(lines)


def _of(nbytes: float, psi: float) -> str:
    return f"{nbytes / psi:.2f}" if nbytes else "0"


def _chain(m: dict[str, float]) -> str:
    words = [
        f"{m[key]:.0f} {word}{'s' * (m[key] > 1)}"
        for key, word in (("handoffs", "hand-off"), ("collectives", "collective"))
        if m[key]
    ]
    return " and ".join(words or ["none"]) + (f", {m['rounds']:.0f} rounds" if m["collectives"] else "")


def render(page: str) -> str:
    """The page with new tables."""

    def anew(match: re.Match[str]) -> str:
        with (ROOT / match[2]).open(newline="") as file:
            return f"{match[1]}{markdown(list(csv.DictReader(file)), int(match[3]))}\n\n"

    return BLOCK.sub(anew, page)


# ---- many processes -----------------------------------------------------------------------------------------------------------
def rank_main(rank: int, figure: str, n: int, world: int, out: str) -> None:
    """One process of a system's run; rank 0 appends the rows to ``out``."""
    import deepspeed
    import torch.distributed as dist

    deepspeed.utils.logger.setLevel("ERROR")
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # DeepSpeed prints the partition
        mine = watch(rank, world, figure, n)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, mine)
    if rank == 0:
        with open(out, "a", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            if not file.tell():
                writer.writeheader()
            writer.writerows(
                {**row, "torch": torch.__version__, "deepspeed": deepspeed.__version__} for row in rows_of(figure, n, everyone)
            )
    dist.barrier()
    dist.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table1", description=__doc__.split("\n")[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[3, 4], help="N; the largest world has N^2 processes")
    parser.add_argument("--figures", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--out", default="rows.csv", help="append rows to this file")
    parser.add_argument("--write", action="store_true", help="run nothing; write the tables of docs/table1.md from their files")
    args = parser.parse_args(argv)
    if args.write:
        PAGE.write_text(render(PAGE.read_text()))
        return 0
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    for n in args.stages:
        for figure in args.figures:
            world = cost(figure, n).devices
            spawn(rank_main, world, figure, n, world, args.out)
            print(f"N = {n}, {figure}: done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
