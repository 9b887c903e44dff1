"""Dry-run of a cyclic pipeline: all ranks' instructions, with tags for tensors; every send blocks until it is received.

It trusts nothing that the schedule says. It checks that

- the run ends, also with a barrier after every ``train_batch``, and messages match;
- both passes of every micro-batch read the rule's version, or its correction if that is stale and the schedule corrects it;
- no version is overwritten while it is in use, and no rank keeps more copies than the schedule says;
- after the last step every holder has the newest version itself;
- an update holds every micro-batch of its step once, in order, from every stage that uses the unit;
- so does a prediction, of the micro-batches whose gradients are there when the next step begins to read the stage. It is of the
  newest version.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from deepspeed_cdp.plan.pipeline_schedule import Instruction, PipeSchedule, ProgramCursor

_Weights = tuple[int, bool]  # a version, or (True) its correction; that of version 0 is version 0


class ScheduleError(AssertionError):
    """A schedule that breaks a rule. The message names rank and instruction."""


@dataclass
class _PipelineRank:
    """Tags of a rank's tensors. Passes are (stage, step, micro-batch)."""

    todo: list[Instruction] = field(default_factory=list)
    inputs: set[tuple[int, int, int]] = field(default_factory=set)
    outputs: set[tuple[int, int, int]] = field(default_factory=set)
    output_grads: set[tuple[int, int, int]] = field(default_factory=set)
    input_grads: set[tuple[int, int, int]] = field(default_factory=set)
    graphs: dict[tuple[int, int, int], dict[int, tuple[int, _Weights]]] = field(default_factory=dict)  # pass -> unit -> copy
    weights: dict[tuple[int, int], _Weights] = field(default_factory=dict)  # (unit, copy) -> what it holds
    sums: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))  # (unit, stage)
    handed: dict[tuple[str, int, int, int], list[tuple[int, int]]] = field(default_factory=dict)  # (message, unit, stage, step)
    masters: dict[int, int] = field(default_factory=dict)  # owned stage -> version
    norms: dict[int, list[int]] = field(default_factory=dict)  # step -> stages
    totals: set[int] = field(default_factory=set)
    most_graphs: int = 0


@dataclass
class PipelineRun:
    """Result of a dry-run; ``activations``: per rank, the most passes whose activations are alive at once."""

    activations: list[int]


def dry_run(
    schedule: PipeSchedule,
    calls: int = 4,
    barriers: bool = True,
    change: Callable[[int, list[Instruction]], list[Instruction]] | None = None,
) -> PipelineRun:
    """Run ``calls`` steps and the rest.

    Args:
        barriers: no rank begins its next call before all ranks have ended this one.
        change: (rank, instructions) -> its instructions, to break something in tests.
    Raises:
        ScheduleError: a rule is broken.
    """
    ranks = [_PipelineRank() for _ in range(schedule.ranks)]
    cursors = [ProgramCursor(schedule, r) for r in range(schedule.ranks)]
    for r, rank in enumerate(ranks):
        for u in range(len(schedule.units)):
            if r in schedule.holders(u):
                for form in schedule.read_forms(u):
                    rank.weights[u, schedule.copy(u, 0, form)] = 0, False
    run = _DryRun(schedule, ranks)
    queues = [[c.call() for _ in range(calls)] + [c.rest()] for c in cursors]
    if change:
        queues = [[change(r, part) for part in parts] for r, parts in enumerate(queues)]
    if barriers:
        for call in range(calls + 1):
            for r, rank in enumerate(ranks):
                rank.todo = list(queues[r][call])
            run.run()
    else:
        for r, rank in enumerate(ranks):
            rank.todo = [i for part in queues[r] for i in part]
        run.run()
    for r, rank in enumerate(ranks):
        for u in range(len(schedule.units)):
            if r in schedule.holders(u) and rank.weights.get((u, schedule.copy(u, calls, False))) != (calls, False):
                raise ScheduleError(f"rank {r} ends without version {calls} of unit {u}")
        if rank.totals != set(range(calls)):
            raise ScheduleError(f"rank {r} knows the losses of steps {sorted(rank.totals)} of {calls}")
        if rank.graphs:
            raise ScheduleError(f"rank {r} ends with activations of {sorted(rank.graphs)}")
    return PipelineRun([rank.most_graphs for rank in ranks])


class _DryRun:
    def __init__(self, schedule: PipeSchedule, ranks: list[_PipelineRank]):
        self.schedule, self.ranks = schedule, ranks
        self.local = {
            "load": self._load,
            "forward": self._forward,
            "backward": self._backward,
            "send_early": self._keep,  # to itself
            "send_finished": self._keep,
            "predict": self._predict,
            "norm": self._norm,
            "update": self._update,
            "publish": self._publish,
        }

    def run(self) -> None:
        """Run all instructions: local ones at once, a message when both its sides have reached it."""
        moved = True
        while moved:
            moved = False
            for r, rank in enumerate(self.ranks):
                while rank.todo:
                    i = rank.todo[0]
                    way, _, kind = i.name.partition("_")
                    if kind and i.peer != r:
                        if way == "recv" or not self._peer_ready(r, i):
                            break
                        self._deliver(r, i, self.ranks[i.peer].todo.pop(0))
                    else:
                        self._local(r, rank, i)
                    rank.todo.pop(0)
                    moved = True
        stuck = {r: str(rank.todo[0]) for r, rank in enumerate(self.ranks) if rank.todo}
        if stuck:
            raise ScheduleError(f"deadlock; each rank waits at {stuck}")

    def _peer_ready(self, r: int, i: Instruction) -> bool:
        there = self.ranks[i.peer].todo
        wanted = (i.name.replace("send", "recv"), r, i.step, i.unit)
        return bool(there) and (there[0].name, there[0].peer, there[0].step, there[0].unit) == wanted

    @staticmethod
    def _need(good: bool, r: int, i: Instruction, why: str) -> None:
        if not good:
            raise ScheduleError(f"rank {r}, {i}: {why}")

    def _deliver(self, r: int, i: Instruction, j: Instruction) -> None:
        a, b, need = self.ranks[r], self.ranks[i.peer], self._need
        kind, mine, theirs = i.name[5:], (i.stage, i.step, i.micro), (j.stage, j.step, j.micro)
        if kind == "activation":
            need(mine in a.outputs and theirs == (i.stage + 1, i.step, i.micro), r, i, f"does not fit {j}")
            b.inputs.add(theirs)
        elif kind == "grad":
            need(mine in a.input_grads and theirs == (i.stage - 1, i.step, i.micro), r, i, f"does not fit {j}")
            b.output_grads.add(theirs)
        elif kind == "sum":
            need(j.stage == i.stage and j.micro == i.micro + 1, r, i, f"does not fit {j}")
            b.sums[i.unit, i.stage] = list(a.sums[i.unit, i.stage])
        elif kind in ("early", "finished"):
            need(j.stage == i.stage, r, i, f"does not fit {j}")
            b.handed[kind, i.unit, i.stage, i.step] = list(a.sums[i.unit, i.stage])
        elif kind == "norms":
            b.norms[i.step] = list(a.norms[i.step])
        elif kind == "totals":
            need(a.norms.get(i.step) == list(range(self.schedule.stages))[::-1], r, i, f"norms of {a.norms.get(i.step)} only")
            b.totals.add(i.step)
        elif kind == "weights":
            sent = a.weights.get((i.unit, self.schedule.copy(i.unit, i.version, i.corrected)))
            need(sent == (i.version, i.corrected) == (j.version, j.corrected), r, i, f"holds {_text(sent)}, for {j}")
            self._write(i.peer, b, j, i.unit, (i.version, i.corrected))

    def _write(self, r: int, rank: _PipelineRank, i: Instruction, unit: int, new: _Weights) -> None:
        """A new version overwrites the content of its copy, which no pass may still need."""
        copy = self.schedule.copy(unit, *new)
        self._need(copy < self.schedule.copies(unit), r, i, f"there is no copy {copy} of unit {unit}")
        for at, read in rank.graphs.items():
            self._need(read.get(unit, (-1,))[0] != copy, r, i, f"copy {copy} of unit {unit} is in use by {at}")
        held = [version for (u, _), (version, form) in rank.weights.items() if u == unit and form == new[1]]
        self._need(new[0] > max(held, default=-1), r, i, "is older than the version in use")
        rank.weights[unit, copy] = new

    # ---- local instructions -----------------------------------------------------------------------------------------------
    def _local(self, r: int, rank: _PipelineRank, i: Instruction) -> None:
        run = self.local.get(i.name)
        if run is None:
            raise ScheduleError(f"rank {r}: no such instruction: {i}")
        run(r, rank, i)

    def _load(self, r: int, rank: _PipelineRank, i: Instruction) -> None:
        if i.stage == 0:
            rank.inputs.add((i.stage, i.step, i.micro))

    def _rule(self, i: Instruction, stage: int) -> _Weights:
        """What the micro-batch reads of units whose home is this stage."""
        version = self.schedule.version(i.step, i.micro, stage)
        return version, self.schedule.delay_corrected and 0 < version < i.step

    def _need_rule(self, r: int, i: Instruction) -> None:
        said = (i.version, i.corrected and i.version > 0)
        self._need(said == self._rule(i, i.stage), r, i, "does not say the rule's version")

    def _forward(self, r: int, rank: _PipelineRank, i: Instruction) -> None:
        schedule, need, at = self.schedule, self._need, (i.stage, i.step, i.micro)
        need(at in rank.inputs, r, i, "has no input")
        rank.inputs.discard(at)
        rank.graphs[at] = read = {}
        for u in schedule.units_at(i.stage):
            home = schedule.units[u][0]
            wanted = self._rule(i, home)
            copy = schedule.copy(u, wanted[0], schedule.corrected(i.micro, home))
            need(rank.weights.get((u, copy)) == wanted, r, i, f"lacks {_text(wanted)} of unit {u}")
            read[u] = copy, wanted
        self._need_rule(r, i)
        rank.outputs.add(at)
        if i.stage < schedule.stages - 1 and schedule.rank_of(i.step, i.micro, i.stage + 1) == r:
            rank.inputs.add((i.stage + 1, i.step, i.micro))
        rank.most_graphs = max(rank.most_graphs, len(rank.graphs))

    def _backward(self, r: int, rank: _PipelineRank, i: Instruction) -> None:
        schedule, need, at = self.schedule, self._need, (i.stage, i.step, i.micro)
        need(at in rank.graphs, r, i, "has no forward")
        self._need_rule(r, i)
        need(i.stage == schedule.stages - 1 or at in rank.output_grads, r, i, "has no gradient")
        for u, (copy, read) in rank.graphs.pop(at).items():
            need(rank.weights.get((u, copy)) == read, r, i, f"{_text(read)} is gone")
            so_far = rank.sums[u, i.stage]
            if i.micro == 0:
                so_far.clear()
            need(so_far == [(i.step, q) for q in range(i.micro)], r, i, f"unit {u} holds the sum of {so_far}")
            so_far.append((i.step, i.micro))
        rank.output_grads.discard(at)
        rank.input_grads.add(at)
        if i.stage and schedule.rank_of(i.step, i.micro, i.stage - 1) == r:
            rank.output_grads.add((i.stage - 1, i.step, i.micro))

    def _keep(self, r: int, rank: _PipelineRank, i: Instruction) -> None:
        rank.handed[i.name[5:], i.unit, i.stage, i.step] = list(rank.sums[i.unit, i.stage])

    def _need_sums(self, r: int, rank: _PipelineRank, i: Instruction, kind: str, count: int) -> None:
        """The sums of the stage's units hold the step's first ``count`` micro-batches."""
        wanted = [(i.step, q) for q in range(count)]
        for u in self.schedule.homed(i.stage):
            for b in self.schedule.units[u]:
                handed = rank.handed.pop((kind, u, b, i.step), None)
                got = rank.sums[u, b] if handed is None else handed
                self._need(got == wanted, r, i, f"the sum of unit {u} from stage {b} holds {got}")
                if kind == "finished" and handed is None:
                    rank.sums[u, b] = []  # it is averaged in place

    def _predict(self, r: int, rank: _PipelineRank, i: Instruction) -> None:
        schedule, version = self.schedule, rank.masters.get(i.stage, 0)
        self._need_sums(r, rank, i, "early", schedule.micro_batches - schedule.stages + i.stage + 1)
        self._need(0 < version == i.version == i.step, r, i, f"predicts from version {version}")
        for u in schedule.homed(i.stage):
            self._write(r, rank, i, u, (version, True))

    def _norm(self, r: int, rank: _PipelineRank, i: Instruction) -> None:
        schedule, need = self.schedule, self._need
        self._need_sums(r, rank, i, "finished", schedule.micro_batches)
        if schedule.placement == "single" or i.stage == schedule.stages - 1:
            rank.norms.setdefault(i.step, [])
        need(rank.norms.get(i.step) == list(range(schedule.stages - 1, i.stage, -1)), r, i, "norms before it are missing")
        rank.norms[i.step].append(i.stage)
        if i.stage == 0:
            rank.totals.add(i.step)

    def _update(self, r: int, rank: _PipelineRank, i: Instruction) -> None:
        self._need(not self.schedule.exact_norm or i.step in rank.totals, r, i, "does not know the step's norm")
        self._need(i.step in rank.norms, r, i, "comes before its norm")
        rank.masters[i.stage] = i.version
        for u in self.schedule.homed(i.stage):
            for form in self.schedule.updated_forms(u):
                self._write(r, rank, i, u, (i.version, form))

    def _publish(self, r: int, rank: _PipelineRank, i: Instruction) -> None:
        for u in self.schedule.homed(i.stage):
            self._write(r, rank, i, u, (i.version, False))


def _text(weights: _Weights | None) -> str:
    if weights is None:
        return "nothing"
    return f"{'the correction of ' if weights[1] else ''}version {weights[0]}"
