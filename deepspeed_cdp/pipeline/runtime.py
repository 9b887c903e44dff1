"""One rank of a cyclic pipeline: executes its program (plan/pipeline_schedule.py), without DeepSpeed.

A receive posts its buffer when the program reaches it; the instruction that needs the message waits for it. A send never blocks.
The program has no circle even if both blocked (verify/pipeline.py), so no wait here can be part of one.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_cdp.optim.offload import OffloadedOwner
from deepspeed_cdp.optim.stage_owner import StageOwner
from deepspeed_cdp.optim.state import part_of
from deepspeed_cdp.pipeline import wire
from deepspeed_cdp.pipeline.divergence import PipeDivergence
from deepspeed_cdp.pipeline.initial_values import broadcast_initial_values
from deepspeed_cdp.pipeline.state import FinishedStep, MicroBatchReader, Pass, PipelineStage
from deepspeed_cdp.pipeline.weights import UnitWeights
from deepspeed_cdp.plan.constants import OPTIONS
from deepspeed_cdp.plan.delay_correction import DelayCorrection
from deepspeed_cdp.plan.pipeline_schedule import Instruction, PipeSchedule, ProgramCursor
from deepspeed_cdp.transport.base import Ticket, Transport


class PipeRuntime:
    """One rank of a cyclic pipeline; the module's docstring describes it.

    Attributes:
        global_step: steps begun since training began.
        finished: the last step whose loss and norms this rank knows, or None.
        skipped: steps that were not applied because their norm was not finite (exact_norm only).
    """

    def __init__(
        self,
        schedule: PipeSchedule,
        rank: int,
        stages: Mapping[int, PipelineStage],
        loss: Callable[[Any, Any], Tensor],
        optimizer: torch.optim.Optimizer,
        names: dict[nn.Parameter, str],
        transport: Transport | None,
        device: torch.device,
        clip: float = 0.0,
        sum_dtype: torch.dtype | None = None,
        dynamic: bool = False,
        warmup_steps: int = 0,
        offload: bool = False,
        pin: bool = True,
        read: tuple[Callable[[Any], Any], Callable[[Any], Any]] = (lambda x: x, lambda x: x),
        check_divergence: int = 1,
        correction: DelayCorrection = DelayCorrection(),  # noqa: B008  (it is frozen)
    ):
        """Collective: replicas and tied copies take the values of the lowest rank that has them.

        Args:
            stages: this rank's, by number.
            loss: (the last stage's outputs, labels) -> scalar.
            names: of the parameters in the optimizer's groups.
            dynamic: shapes change from micro-batch to micro-batch.
            warmup_steps: the first steps of training follow K = 0.
            offload: masters and optimizer state in host memory; pin: page-locked, for asynchronous copies.
            check_divergence: steps from one comparison of the ranks' optimizer options to the next; 0: none.
            read: functions that move a micro-batch's inputs, and its labels, to the device.
            correction: what stale readers read; ``schedule`` says whether there is one, and whether it is a prediction.
        """
        assert schedule.delay_corrected == bool(correction), (schedule, correction)
        assert schedule.predicts == (correction.method == "predict"), (schedule, correction)
        self.schedule, self.rank, self.local_stages, self.loss_fn = schedule, rank, dict(stages), loss
        self.user_optimizer, self.transport, self.device, self.clip = optimizer, transport, device, clip
        self.warmup_steps, self._configured = warmup_steps, schedule
        self.dynamic, (self.read_inputs, self.read_labels) = dynamic, read
        self.global_step, self.skipped = 0, 0
        self.finished: FinishedStep | None = None
        self._divergence = None
        if check_divergence and transport is not None:
            self._divergence = PipeDivergence(schedule, rank, transport, optimizer, check_divergence)
        self.units: dict[int, UnitWeights] = {}
        for u in range(len(schedule.units)):
            mine = [s for s in schedule.units[u] if s in self.local_stages]
            if mine:
                self.units[u] = UnitWeights(
                    self.local_stages[mine[0]].units.get(u, ()), schedule.copies(u), mine, sum_dtype, device
                )
        self._specs: dict[tuple[str, bool, int], wire.Spec] = {}
        broadcast_initial_values(schedule, rank, self.units, self.local_stages, transport)
        self._cursor: ProgramCursor | None = None
        self._start, self._sent = 0, deque[Ticket]()  # first step of this run; pushes from memory that is not written again
        mine = [s for s in self.local_stages if schedule.owner(s) == rank]
        self._landing = self._make_landing(mine)
        self.owners = {s: self._make_owner(s, names, offload, pin, correction) for s in mine}

    def _make_owner(
        self, stage: int, names: dict[nn.Parameter, str], offload: bool, pin: bool, correction: DelayCorrection
    ) -> StageOwner:
        """Masters of the units whose home the stage is."""
        published = self._written(stage, False)
        make_owner: Callable[..., StageOwner] = partial(OffloadedOwner, pin=pin) if offload else StageOwner
        return make_owner(
            values=published[0],
            sums=self._sums_of(stage, "finished"),
            published=published,
            corrected=self._written(stage, True) if True in self.schedule.read_forms(stage) else None,
            correction=correction,
            optimizer=self.user_optimizer,
            make_optimizer=lambda optimizer, masters: part_of(optimizer, masters, names),
            divisor=lambda step: self.schedule.stages,
            clip=self.clip,
            device=self.device,
            early=self._early_sums(stage),
            early_divisor=lambda step: (self.schedule.predictor(stage) + 1) / self.schedule.rounds,
        )

    def _written(self, stage: int, corrected: bool) -> list[dict[str, Tensor]]:
        """By the owner's slot, the memory of the stage's units that updates write.

        Where passes read corrections only, these overwrite the versions, which have the same memory.
        """
        schedule = self.schedule
        return [
            {
                name: value
                for u in schedule.homed(stage)
                for name, value in zip(self.units[u].names, self.units[u].values[schedule.copy(u, slot, corrected)])
            }
            for slot in range(schedule.slots(stage))
        ]

    def _sums_of(self, stage: int, kind: str) -> dict[int, dict[str, Tensor]]:
        """Where the stage's own ``finished`` or ``early`` sums are for its owner: by unit and name."""
        found = {}
        for u in self.schedule.homed(stage):
            unit, landing = self.units[u], self._landing.get((kind, u, stage))
            found[u] = dict(zip(unit.names, unit.grads[stage] if landing is None else unit.sum_views(landing)))
        return found

    def _early_sums(self, stage: int) -> dict[int, dict[str, Tensor]] | None:
        return self._sums_of(stage, "early") if "early" in self._configured.handed_over(stage, 1) else None

    def set_rounds(self, rounds: int) -> None:
        """Collective: flush; from now on a step has ``rounds`` times N micro-batches."""
        self.flush()
        self.schedule, self._configured = replace(self.schedule, rounds=rounds), replace(self._configured, rounds=rounds)
        self._landing = self._make_landing(self.owners)
        for stage, owner in self.owners.items():
            owner.use_sums(self._sums_of(stage, "finished"), self._early_sums(stage))

    def _make_landing(self, owned: Iterable[int]) -> dict[tuple[str, int, int], Tensor]:
        """Memory for sums that do not stay where they were summed: (``finished`` or ``early``, unit, stage) -> uint8, 1-D."""
        return {
            (kind, u, b): torch.zeros(self.units[u].layout.g_bytes, dtype=torch.uint8, device=self.device)
            for s in owned
            for u in self._configured.homed(s)
            for kind, micro in self._configured.handed_over(u, 1).items()
            for b in self._configured.units[u]
            if self._configured.lands(u, b, micro)
        }

    @property
    def link(self) -> Transport:
        """The transport; programs of one rank never ask for it."""
        assert self.transport is not None
        return self.transport

    # ---- a run: from one flush to the next ----------------------------------------------------------------------------------
    @property
    def open(self) -> bool:
        """Whether steps have been made since the last flush."""
        return self._cursor is not None

    def _begin(self) -> None:
        self.schedule = replace(self.schedule, alone=self.finished is None)
        self._cursor, self._start = ProgramCursor(self.schedule, self.rank), self.global_step
        self._passes: dict[tuple[int, int, int], Pass] = {}
        self._labels: dict[tuple[int, int], Any] = {}
        self._losses: dict[int, list[Tensor]] = {}
        self._vectors: dict[int, Tensor] = {}  # step -> squared norms by stage, as far as they came, and the loss
        self._totals: dict[int, Tensor] = {}  # step -> all of them
        if self.finished is not None:
            self._totals[-1] = torch.cat([self.finished.squares, self.finished.loss.reshape(1)])
        self._waits: dict[Any, Ticket] = {}  # by buffer: the message that must arrive before its use
        self._pushes: dict[Any, list[Ticket]] = {}  # by buffer: pushes that still read it
        for u, unit in self.units.items():
            unit.fill(self.schedule.copy(u, 0, True))

    def train(self, batches: Iterator[Any] | None) -> Tensor:
        """One step.

        Args:
            batches: yields the step's micro-batches (inputs, labels); read on ranks that hold the first or the last stage.
        Returns:
            The mean loss of the last step that is finished everywhere (float64, on the device): under ``dp`` and in the very
            first call of this step, else of the step before.
        """
        wanted = 0 if self.global_step < self.warmup_steps else self._configured.threshold
        if wanted != self.schedule.threshold:  # versions kept are as many as the rule after the warm-up needs
            self.flush()
            exact = self.clip > 0 and wanted in (0, 2 * self.schedule.stages - 1)
            self.schedule = replace(self.schedule, threshold=wanted, exact_norm=exact)
        if self._cursor is None:
            self._begin()
        assert self._cursor is not None
        step = self._cursor.step
        for owner in self.owners.values():
            owner.record(step)
        if self._divergence:
            self._divergence.record(self.global_step)
        self._vectors.pop(step - 3, None)  # sent long ago
        self._feed = MicroBatchReader(batches, self.schedule.micro_batches)
        for i in self._cursor.call():
            self._do(i)
        if self.local_stages.keys() & {0, self.schedule.stages - 1}:
            self._feed.finish()
        self.global_step += 1
        self._finish_step(step if self.schedule.drains(step) else step - 1)
        if self._divergence:
            self._divergence.check()
        assert self.finished is not None, "the first call runs its step to the end"
        return self.finished.loss

    @torch.enable_grad()
    def flush(self) -> None:
        """Collective: end all steps; the next one reads the newest version everywhere. Modules must be in training mode."""
        if self._cursor is None:
            return
        for i in self._cursor.rest():
            self._do(i)
        last = self._cursor.step - 1
        self._finish_step(last)
        for ticket in [*self._waits.values(), *self._sent, *(t for ts in self._pushes.values() for t in ts)]:
            ticket.wait(f"rank {self.rank}, step {self._start + last}, flush")
        self._sent.clear()
        assert not self._passes and not self._labels, "a flush leaves nothing under way"
        for u, unit in self.units.items():
            unit.restart(self.schedule.copy(u, self._cursor.step, False))
        for owner in self.owners.values():
            owner.sync_optimizer_state()
            owner.forget_last_update()
        self._cursor = None
        if self._divergence:
            self._divergence.check()

    def _finish_step(self, step: int) -> None:
        """Record a finished step's loss and norms."""
        if step < 0:  # recorded at the flush
            return
        self._wait_for(("totals", step), Instruction("recv_totals", 0, step))
        vector = self._totals[step]
        self._totals.pop(step - 1, None)
        stages = self.schedule.stages
        self.finished = FinishedStep(self._start + step, vector[stages], vector[:stages])
        if self._divergence:
            self._divergence.read(self._start + step, vector[stages + 1 :])

    # ---- instructions -------------------------------------------------------------------------------------------------------
    def _do(self, i: Instruction) -> None:
        getattr(self, f"_{i.name}")(i)

    def _where(self, i: Instruction) -> str:
        micro = f" of micro-batch {i.micro}" if i.micro >= 0 else ""
        return f"rank {self.rank}, step {self._start + i.step}, stage {i.stage}, {i.name.replace('_', ' ')}{micro}"

    def _wait_for(self, key: Any, i: Instruction) -> None:
        ticket = self._waits.pop(key, None)
        if ticket is not None:
            ticket.wait(self._where(i))

    def _wait_pushes(self, key: Any, i: Instruction) -> None:
        """Wait for the pushes that read a buffer, before it is written again."""
        for ticket in self._pushes.pop(key, ()):
            ticket.wait(self._where(i))

    def _push(self, stream: str, i: Instruction, tensor: Tensor, key: Any = None) -> Ticket:
        ticket = self.link.push(stream, i.peer, wire.as_bytes(tensor))
        if key is not None:
            self._pushes.setdefault(key, []).append(ticket)
        else:
            self._sent.append(ticket)
            while len(self._sent) > 8 * self.schedule.stages:  # (bounds how many are remembered)
                self._sent.popleft().wait(self._where(i))
        return ticket

    def _at(self, i: Instruction) -> tuple[int, int, int]:
        return (i.stage, i.step, i.micro)

    def _bind(self, i: Instruction) -> None:
        """Point the stage's parameters at what this micro-batch reads: a version or its correction."""
        for u in self.schedule.units_at(i.stage):
            home = self.schedule.units[u][0]
            version, corrected = self.schedule.version(i.step, i.micro, home), self.schedule.corrected(i.micro, home)
            copy = self.schedule.copy(u, version, corrected)
            self._wait_for(("weights", u, copy), i)
            self.units[u].bind(copy)

    def _load(self, i: Instruction) -> None:
        first, last = i.stage == 0, i.stage == self.schedule.stages - 1
        if not first and 0 in self.local_stages:
            return  # the labels came with the inputs
        batch = self._feed.get(i.micro)
        if first:
            self._passes[self._at(i)] = Pass(self.read_inputs(batch[0]))
        if last or self.schedule.stages - 1 in self.local_stages:
            self._labels[i.step, i.micro] = self.read_labels(batch[1])

    def _forward(self, i: Instruction) -> None:
        self._bind(i)
        this = self._passes[self._at(i)]
        for ticket in this.receives or ():
            ticket.wait(self._where(i))
        this.receives = None
        with torch.enable_grad():
            out = self.local_stages[i.stage].run(this.inputs, (self._start + i.step) * self.schedule.micro_batches + i.micro)
            if i.stage == self.schedule.stages - 1:
                loss = self.loss_fn(out, self._labels.pop((i.step, i.micro)))
                self._losses.setdefault(i.step, []).append(loss.detach().to(torch.float64))
                this.outputs = loss
                return
        this.outputs = out
        spec = wire.describe(out)
        if self.schedule.rank_of(i.step, i.micro, i.stage + 1) == self.rank:
            given = [t.detach().requires_grad_(t.requires_grad) for t in wire.tensors_of(out)]
            self._passes[i.stage + 1, i.step, i.micro] = Pass(given[0] if spec.is_tensor else tuple(given))

    def _backward(self, i: Instruction) -> None:
        self._bind(i)
        this, units = self._passes.pop(self._at(i)), self.schedule.units_at(i.stage)
        for ticket in (
            *(this.receives or ()),
            *(this.sends or ()),
        ):  # (a rank that has sent back a gradient has received the output)
            ticket.wait(self._where(i))
        for u in units:
            unit = self.units[u]
            self._wait_for(("sum", u, i.stage), i)
            self._wait_pushes(("sum", u, i.stage), i)
            if i.micro == 0:
                unit.sums[i.stage].zero_()
            unit.begin_backward(i.stage)
        with self.local_stages[i.stage].backward_context():
            if i.stage == self.schedule.stages - 1:
                (this.outputs / self.schedule.rounds).backward()
            else:
                torch.autograd.backward([t for t in wire.tensors_of(this.outputs) if t.requires_grad], this.grads)
        for u in units:
            self.units[u].end_backward(i.stage)
        if i.stage:
            given = [t for t in wire.tensors_of(this.inputs) if t.requires_grad]
            grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in given]
            if self.schedule.rank_of(i.step, i.micro, i.stage - 1) == self.rank:
                self._passes[i.stage - 1, i.step, i.micro].grads = grads
            else:
                self._passes[self._at(i)] = Pass(None, grads=grads)  # until they are sent

    # ---- messages of passes -------------------------------------------------------------------------------------------------
    def _send_activation(self, i: Instruction) -> None:
        this = self._passes[self._at(i)]
        this.sends = self.send_output(i, this.outputs, True)

    def _recv_activation(self, i: Instruction) -> None:
        inputs, coming = self.receive_output(i, True)
        self._passes[self._at(i)] = Pass(inputs, receives=coming)

    def send_output(self, i: Instruction, output: Any, training: bool) -> list[Ticket]:
        """Push a stage's output to ``i.peer``; shapes and dtypes first, if the peer does not know them."""
        spec, key = wire.describe(output), ("to", training, i.peer)
        if self.dynamic or key not in self._specs:
            self._push("describe", i, wire.pack(spec, self.device))
            self._specs[key] = spec
        elif self._specs[key] != spec:
            raise ValueError(
                f"stage {i.stage} returned {wire.as_text(spec)}, before it was {wire.as_text(self._specs[key])}; pass "
                "dynamic_shape=True to PipelineModule, or give it batches of one size (drop_last=True)"
            )
        tensors = [t.detach().contiguous() for t in wire.tensors_of(output)]
        return [self.link.push("activation", i.peer, wire.as_bytes(t)) for t in tensors]

    def receive_output(self, i: Instruction, training: bool) -> tuple[Any, list[Ticket]]:
        """Post receives for the output of ``i.peer``: its tensors, and tickets to wait for."""
        key = ("from", training, i.peer)
        if self.dynamic or key not in self._specs:
            words, where = wire.empty_description(self.device), self._where(i) if self.open else f"rank {self.rank}, evaluation"
            self.link.post("describe", i.peer, wire.as_bytes(words)).wait(where)
            self._specs[key] = wire.unpack(words)
        spec = self._specs[key]
        tensors = spec.empty(self.device)
        tickets = [self.link.post("activation", i.peer, wire.as_bytes(t)) for t in tensors]
        if training:
            for tensor, item in zip(tensors, spec.items):
                tensor.requires_grad_(item.grad)
        return (tensors[0] if spec.is_tensor else tuple(tensors)), tickets

    def forget_shapes(self, training: bool) -> None:
        """Outputs may be of other shapes from now on, on all ranks."""
        self._specs = {k: v for k, v in self._specs.items() if k[1] != training}

    def _send_grad(self, i: Instruction) -> None:
        for grad in self._passes.pop(self._at(i)).grads or ():
            self._push("grad", i, grad.contiguous())

    def _recv_grad(self, i: Instruction) -> None:
        this = self._passes[self._at(i)]
        this.grads = [
            torch.empty_like(t, memory_format=torch.contiguous_format) for t in wire.tensors_of(this.outputs) if t.requires_grad
        ]
        this.receives = [self.link.post("grad", i.peer, wire.as_bytes(g)) for g in this.grads]

    # ---- sums, norms, updates -----------------------------------------------------------------------------------------------
    def _send_sum(self, i: Instruction) -> None:
        self._push("sum", i, self.units[i.unit].sums[i.stage], ("sum", i.unit, i.stage))

    def _recv_sum(self, i: Instruction) -> None:
        self._wait_pushes(("sum", i.unit, i.stage), i)
        self._waits["sum", i.unit, i.stage] = self.link.post("sum", i.peer, self.units[i.unit].sums[i.stage])

    def _hand_over(self, i: Instruction) -> None:
        kind, flat = i.name.removeprefix("send_"), self.units[i.unit].sums[i.stage]
        if i.peer == self.rank:
            self._landing[kind, i.unit, i.stage].copy_(flat)
        else:
            self._push(kind, i, flat, ("sum", i.unit, i.stage))

    def _take_over(self, i: Instruction) -> None:
        key = i.name.removeprefix("recv_"), i.unit, i.stage
        self._waits[key] = self.link.post(key[0], i.peer, self._landing[key])

    _send_early = _send_finished = _hand_over
    _recv_early = _recv_finished = _take_over

    def _tied_sums(self, i: Instruction, unit: int, kind: str) -> list[list[Tensor]]:
        """The unit's sums of the stages beside its home; all of its sums are there then."""
        used = self.schedule.units[unit]
        for b in used:
            self._wait_for((kind, unit, b), i)
        return [self.units[unit].sum_views(self._landing[kind, unit, b]) for b in used[1:]]

    def _predict(self, i: Instruction) -> None:
        self._wait_readers(i, (True,))
        for u in self.schedule.homed(i.stage):
            tied = self._tied_sums(i, u, "early")
            if self.units[u].names:
                self.owners[i.stage].predict(i.step, u, i.version % self.schedule.slots(i.stage), tied)

    def _vector(self, step: int) -> Tensor:
        """Squared norms by stage, the loss, and by stage the options that owners compare; float64."""
        if step not in self._vectors:
            self._vectors[step] = self._new_vector()
        return self._vectors[step]

    def _new_vector(self) -> Tensor:
        stages = self.schedule.stages
        return torch.zeros(stages + 1 + stages * OPTIONS, dtype=torch.float64, device=self.device)

    def _recv_norms(self, i: Instruction) -> None:
        self._waits["norms", i.step] = self.link.post("norms", i.peer, wire.as_bytes(self._vector(i.step)))

    def _norm(self, i: Instruction) -> None:
        schedule = self.schedule
        self._wait_for(("norms", i.step), i)
        owner, squares = self.owners[i.stage], [torch.zeros(1, dtype=torch.float64, device=self.device)]
        for u in schedule.homed(i.stage):
            # before an update with the exact norm, the next step's sums may land in the same memory
            squares.append(owner.average(i.step, u, self._tied_sums(i, u, "finished"), keep=schedule.exact_norm))
        vector = self._vector(i.step)
        vector[i.stage] = torch.cat(squares).sum()
        if i.stage == schedule.stages - 1:
            vector[schedule.stages] = torch.stack(self._losses.pop(i.step)).mean()
        if self._divergence:
            self._divergence.write(self._start + i.step, vector[schedule.stages + 1 :].view(-1, OPTIONS)[i.stage])
        if i.stage == 0:
            self._totals[i.step] = vector.clone()

    def _send_norms(self, i: Instruction) -> None:
        self._push("norms", i, self._vector(i.step).clone())

    def _send_totals(self, i: Instruction) -> None:
        self._push("totals", i, self._totals[i.step])

    def _recv_totals(self, i: Instruction) -> None:
        into = self._totals[i.step] = self._new_vector()
        self._waits["totals", i.step] = self.link.post("totals", i.peer, wire.as_bytes(into))

    def _update(self, i: Instruction) -> None:
        schedule = self.schedule
        norm2 = self._norm_to_clip_by(i) if self.clip > 0 else None
        skip = schedule.exact_norm and norm2 is not None and not bool(torch.isfinite(norm2))
        self.skipped += skip and i.stage == max(self.owners)
        forms, owner = schedule.updated_forms(i.stage), self.owners[i.stage]
        self._wait_readers(i, forms)
        if skip:
            owner.discard()
        slot = i.version % schedule.slots(i.stage)
        if True in self._configured.updated_forms(i.stage) and True not in forms:  # in the warm-up passes read no corrections
            owner.update(i.step, norm2)
            owner.publish(slot, owner.masters)
        else:
            owner.update(i.step, norm2, None, slot if forms else None)
        owner.finish(i.step)

    def _publish(self, i: Instruction) -> None:
        self._wait_readers(i, (False,))
        owner = self.owners[i.stage]
        owner.publish(i.version % self.schedule.slots(i.stage), owner.masters)

    def _wait_readers(self, i: Instruction, forms: Iterable[bool]) -> None:
        """Wait for the pushes that read the copies that this instruction writes."""
        for u in self.schedule.homed(i.stage):
            for form in forms:
                self._wait_pushes(("weights", u, self.schedule.copy(u, i.version, form)), i)

    def _norm_to_clip_by(self, i: Instruction) -> Tensor:
        """Squared: the step's, if it is waited for; else this step's stages >= this one and last step's before it."""
        if self.schedule.exact_norm:
            self._wait_for(("totals", i.step), i)
            return self._totals[i.step][: self.schedule.stages].sum()
        now = self._vector(i.step)[i.stage : self.schedule.stages].sum()
        if i.step - 1 not in self._totals:  # the very first step
            return now
        self._wait_for(("totals", i.step - 1), i)
        return now + self._totals[i.step - 1][: i.stage].sum()

    def _send_weights(self, i: Instruction) -> None:
        copy = self.schedule.copy(i.unit, i.version, i.corrected)
        self._push("weights", i, self.units[i.unit].flats[copy], ("weights", i.unit, copy))

    def _recv_weights(self, i: Instruction) -> None:
        copy = self.schedule.copy(i.unit, i.version, i.corrected)
        key = "weights", i.unit, copy
        self._wait_for(key, i)  # what was in this copy before, if no pass of this rank has read it
        self._waits[key] = self.link.post("weights", i.peer, self.units[i.unit].flats[copy])

    def close(self, drain: bool) -> None:
        """Close the transport.

        Args:
            drain: as ``Transport.close``.
        """
        if self.transport is not None:
            self.transport.close(drain)
