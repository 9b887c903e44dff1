"""Adam in one pass over memory, for owners on GPUs: reads the finished gradient sums, writes the published parameters.

torch's fused AdamW wants gradients of the masters' dtype. With it, bf16 sums would first be copied to fp32, divided and measured,
and the masters copied to bf16 afterwards: 52 bytes of memory traffic per parameter. This kernel needs 28, and 26 for masters in
halves (masters.py). The arithmetic is the same, in fp32.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from packaging.version import Version

from deepspeed_cdp.optim.masters import Masters
from deepspeed_cdp.plan.delay_correction import DelayCorrection

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it
    triton = None

# Elements per program. Many small programs slow the concurrent passes least. Full blocks need no masks, with which every access
# has four bytes. Update of 1.2 billion parameters beside a step of Llama 1.35B on an H200: 8.1 ms; with 32 programs in a loop
# 9.7 ms, and with masks 10.3 ms.
BLOCK = 1024


class Hyper(NamedTuple):
    """Hyperparameters of a parameter group."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    decay: float
    decoupled: bool  # AdamW; else the decay is added to the gradient


# Whether compiled kernels take the constants among the arguments, as @triton.jit functions do: not before 3.3 (torch 2.6).
TAKES_CONSTANTS = triton is not None and Version(triton.__version__) >= Version("3.3")

if triton is not None:

    @triton.jit
    def _pointer(table, tensor, column, kind):
        return tl.multiple_of(tl.load(table + 8 * tensor + column).to(tl.pointer_type(kind)), 16)

    @triton.jit
    def _read(at, inside, MASKED: tl.constexpr):
        return tl.load(at, mask=inside, other=0.0) if MASKED else tl.load(at)

    @triton.jit
    def _write(at, value, inside, MASKED: tl.constexpr):
        if MASKED:
            tl.store(at, value, mask=inside)
        else:
            tl.store(at, value)

    @triton.jit
    def _chunk(table, chunks, SIZE: tl.constexpr):
        """This program's tensor, its elements, and a mask of elements inside the tensor."""
        tensor = tl.load(chunks + 2 * tl.program_id(0))
        at = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * SIZE + tl.arange(0, SIZE)
        return tensor, at, at < tl.load(table + 8 * tensor + 7)

    @triton.jit
    def _read_master(table, tensor, at, inside, HALVES: tl.constexpr, MASKED: tl.constexpr):
        if HALVES:
            low = _read(_pointer(table, tensor, 1, tl.int16) + at, inside, MASKED).to(tl.int32)
            high = _read(_pointer(table, tensor, 4, tl.int16) + at, inside, MASKED).to(tl.int32)
            master = ((high << 16) + low).to(tl.float32, bitcast=True)
        else:
            master = _read(_pointer(table, tensor, 1, tl.float32) + at, inside, MASKED)
        return master

    @triton.jit
    def _write_halves(table, tensor, at, master, inside, MASKED: tl.constexpr):
        bits = master.to(tl.int32, bitcast=True)
        high = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to the nearest, of two to the even one
        high = tl.where(master == master, high, 0x7FC0)
        low = tl.minimum(bits - (high << 16), 32767)  # masters.HIGHEST
        _write(_pointer(table, tensor, 5, tl.int16) + at, high.to(tl.int16), inside, MASKED)
        _write(_pointer(table, tensor, 1, tl.int16) + at, low.to(tl.int16), inside, MASKED)

    @triton.jit
    def _adam(
        table,
        chunks,
        squares,
        clip,
        scale,
        step,
        keep1,
        gain1,
        keep2,
        gain2,
        root,
        eps,
        decay,
        updates,
        DECOUPLED: tl.constexpr,
        CLIPPED: tl.constexpr,
        PUBLISH: tl.constexpr,
        EXTRAPOLATE: tl.constexpr,
        HALVES: tl.constexpr,
        SUM: tl.constexpr,
        PARAMETER: tl.constexpr,
        SIZE: tl.constexpr,
        MASKED: tl.constexpr,
    ):
        tensor, at, inside = _chunk(table, chunks, SIZE)
        m_at, v_at = _pointer(table, tensor, 2, tl.float32) + at, _pointer(table, tensor, 3, tl.float32) + at
        gradient = _read(_pointer(table, tensor, 0, SUM) + at, inside, MASKED).to(tl.float32) * scale
        m, v = _read(m_at, inside, MASKED), _read(v_at, inside, MASKED)
        master = _read_master(table, tensor, at, inside, HALVES, MASKED)
        before = master
        tl.store(squares + tl.program_id(0), tl.sum(gradient * gradient))
        if CLIPPED:
            gradient = gradient * tl.load(clip)
        if DECOUPLED:
            master = master * decay
        else:
            gradient = gradient + decay * master
        m = keep1 * m + gain1 * gradient
        v = keep2 * v + gain2 * gradient * gradient
        master = master - step * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root) + eps)
        _write(m_at, m, inside, MASKED)
        _write(v_at, v, inside, MASKED)
        if HALVES:
            _write_halves(table, tensor, at, master, inside, MASKED)
        else:
            _write(_pointer(table, tensor, 1, tl.float32) + at, master, inside, MASKED)
            if PUBLISH:
                _write(_pointer(table, tensor, 5, PARAMETER) + at, master.to(PARAMETER), inside, MASKED)
        if EXTRAPOLATE:
            ahead = master + updates * (master - before)
            _write(_pointer(table, tensor, 6, PARAMETER) + at, ahead.to(PARAMETER), inside, MASKED)

    @triton.jit
    def _predict(
        table,
        chunks,
        squares,
        clip,
        scale,
        first,
        weight,
        step,
        keep1,
        gain1,
        keep2,
        gain2,
        root,
        eps,
        decay,
        DECOUPLED: tl.constexpr,
        CLIPPED: tl.constexpr,
        HALVES: tl.constexpr,
        SUM: tl.constexpr,
        PARAMETER: tl.constexpr,
        SIZE: tl.constexpr,
        MASKED: tl.constexpr,
    ):
        tensor, at, inside = _chunk(table, chunks, SIZE)
        gradient = _read(_pointer(table, tensor, 0, SUM) + at, inside, MASKED).to(tl.float32) * scale
        master = _read_master(table, tensor, at, inside, HALVES, MASKED)
        m = _read(_pointer(table, tensor, 2, tl.float32) + at, inside, MASKED)
        v = _read(_pointer(table, tensor, 3, tl.float32) + at, inside, MASKED)
        if CLIPPED:
            gradient = gradient * tl.load(clip)
        if DECOUPLED:
            ahead = master * decay
        else:
            gradient, ahead = gradient + decay * master, master
        mean = tl.div_rn(m, first)
        gradient = mean + weight * (gradient - mean)
        m = keep1 * m + gain1 * gradient
        v = keep2 * v + gain2 * gradient * gradient
        ahead = ahead - step * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root) + eps)
        ahead = tl.where(tl.abs(ahead) <= 3.4028234663852886e38, ahead, master)  # nan and infinities fail
        _write(_pointer(table, tensor, 6, PARAMETER) + at, ahead.to(PARAMETER), inside, MASKED)

    @triton.jit
    def _square(table, chunks, squares, scale, SUM: tl.constexpr, SIZE: tl.constexpr, MASKED: tl.constexpr):
        tensor, at, inside = _chunk(table, chunks, SIZE)
        gradient = _read(_pointer(table, tensor, 0, SUM) + at, inside, MASKED).to(tl.float32) * scale
        tl.store(squares + tl.program_id(0), tl.sum(gradient * gradient))

    KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Batch:
    """Some parameters of one group and unit, updated by one launch.

    Args:
        group: index of the optimizer's group.
        sums: finished gradient sums; masters: fp32, or int16 lower halves; m, v: fp32; published, corrected: by copy, what the
            masters and their corrections are written to in the parameters' dtype. All contiguous and aligned to 16 bytes; the
            lists are parallel.
        correction: what ``corrected`` gets; None if it is empty.
        early: early gradient sums, for ``predict``, which alone writes ``corrected`` then; or empty.
    """

    def __init__(
        self,
        group: int,
        sums: Sequence[torch.Tensor],
        masters: Sequence[torch.Tensor],
        m: Sequence[torch.Tensor],
        v: Sequence[torch.Tensor],
        published: Sequence[Sequence[torch.Tensor]],
        corrected: Sequence[Sequence[torch.Tensor]] = (),
        correction: DelayCorrection | None = None,
        early: Sequence[torch.Tensor] = (),
    ):
        columns = (sums, masters, m, v)
        every = (*columns, *published, *corrected, *([early] if early else ()))
        assert all(x.is_contiguous() and x.data_ptr() % 16 == 0 for column in every for x in column)
        assert all(x.dtype == torch.float32 for column in columns[2:] for x in column)
        device, self.group, self.count, self._correction = masters[0].device, group, 0, correction
        self._sum, self._parameter = KINDS[sums[0].dtype], KINDS[published[0][0].dtype]
        self._halves, sizes = masters[0].dtype == torch.int16, [x.numel() for x in masters]
        # where fresh readers are none, both may have one place
        self._publishes = not corrected or bool(early) or corrected[0][0].data_ptr() != published[0][0].data_ptr()
        assert self._publishes or not self._halves

        def table(*columns: Sequence[torch.Tensor]) -> torch.Tensor:
            rows = [[*(column[i].data_ptr() for column in columns), sizes[i]] for i in range(len(sizes))]
            return torch.tensor(rows, dtype=torch.int64, device=device)

        # by the copy that has the masters' upper halves, and the copy to write
        self._updates = [
            [table(*columns, old, copy, ahead) for copy, ahead in zip(published, (corrected if not early else ()) or published)]
            for old in published
        ]
        self._predictions = [[table(early, masters, m, v, old, old, x) for x in corrected if early] for old in published]
        full = torch.cat(
            [torch.stack([torch.full((size // BLOCK,), i), torch.arange(size // BLOCK)], 1) for i, size in enumerate(sizes)]
        )
        tails = torch.tensor([(i, size // BLOCK) for i, size in enumerate(sizes) if size % BLOCK], dtype=torch.int64).view(-1, 2)
        self._squares = torch.empty(len(full) + len(tails), dtype=torch.float32, device=device)
        # chunks (tensor, block), their squared norms, whether the blocks need masks
        self._parts = [
            (chunks.to(device, torch.int32), squares, masked)
            for chunks, squares, masked in ((full, self._squares[: len(full)], False), (tails, self._squares[len(full) :], True))
            if len(chunks)
        ]
        self._compiled: dict[tuple, Any] = {}

    def _launch(self, kernel: Any, table: torch.Tensor, arguments: tuple, constants: tuple) -> None:
        """Launch without Triton's look at all arguments after the first call: arguments of later calls specialize alike.

        It then gets addresses, of which it need not ask the driver whether they are on the device.
        """
        for chunks, squares, masked in self._parts:
            key, grid, given = (kernel.__name__, *constants, masked), (len(squares), 1, 1), (table, chunks, squares, *arguments)
            launch = self._compiled.get(key)
            if launch is not None:
                launch(*(x.data_ptr() if type(x) is torch.Tensor else x for x in given), *constants, masked)
                continue
            compiled = kernel[grid](*given, *constants, masked, num_warps=4)  # None from Triton's interpreter
            if TAKES_CONSTANTS and compiled is not None:
                self._compiled[key] = compiled[grid]

    def square(self, scale: float) -> torch.Tensor:
        """Parts of the squared norm of the sums times ``scale`` (float32, 1-D, one per block); good until the next call."""
        self._launch(_square, self._updates[0][0], (scale,), (self._sum, BLOCK))
        return self._squares

    def update(
        self, hyper: Hyper, scale: float, clip: torch.Tensor | None, copy: int | None, newest: int | None = None
    ) -> torch.Tensor:
        """Apply the next step of Adam (number ``count`` + 1) to the masters, and publish them.

        Args:
            scale: the gradient is the sum times this.
            clip: float32 scalar on the device to multiply the gradient with, or None.
            copy: the published copy to write, or None (not for masters in halves).
            newest: the published copy that has the upper halves of masters in halves.
        Returns:
            parts of the squared norm of the gradient before clipping, as ``square``.
        """
        self.count += 1
        keep1, keep2 = hyper.beta1, hyper.beta2  # the kernel's fp32 scalars are computed in double precision
        correction, root = 1 - keep1**self.count, (1 - keep2**self.count) ** 0.5
        decay = 1 - hyper.lr * hyper.decay if hyper.decoupled else hyper.decay
        extrapolates = copy is not None and self._correction is not None and self._correction.method == "extrapolate"
        self._launch(
            _adam,
            self._updates[newest or 0][copy or 0],
            (
                self._squares if clip is None else clip,
                scale,
                hyper.lr / correction,
                keep1,
                1 - keep1,
                keep2,
                1 - keep2,
                root,
                hyper.eps,
                decay,
                self._correction.updates if self._correction else 0.0,
            ),
            (
                hyper.decoupled,
                clip is not None,
                copy is not None and self._publishes,
                extrapolates,
                self._halves,
                self._sum,
                self._parameter,
                BLOCK,
            ),
        )
        return self._squares

    def predict(self, hyper: Hyper, scale: float, clip: torch.Tensor | None, copy: int, newest: int | None = None) -> None:
        """Write the next step's masters, as far as early sums tell, into ``corrected[copy]``; arguments as of ``update``."""
        assert self._correction
        keep1, keep2, count = hyper.beta1, hyper.beta2, self.count + 1
        first, weight = 1 - keep1**self.count, self._correction.lead(keep1)
        if self.count == 0:  # every update so far was skipped: there is no momentum yet
            first, weight = 1.0, 1.0
        self._launch(
            _predict,
            self._predictions[newest or 0][copy],
            (
                self._squares if clip is None else clip,
                scale,
                first,
                weight,
                hyper.lr / (1 - keep1**count),
                keep1,
                1 - keep1,
                keep2,
                1 - keep2,
                (1 - keep2**count) ** 0.5,
                hyper.eps,
                1 - hyper.lr * hyper.decay if hyper.decoupled else hyper.decay,
            ),
            (hyper.decoupled, clip is not None, self._halves, self._sum, self._parameter, BLOCK),
        )


class Adam:
    """Updates an owner's units for torch.optim.Adam, AdamW or DeepSpeed's FusedAdam, and keeps that optimizer's state.

    Args:
        optimizer: one that ``suits`` accepts.
        masters: fp32 or in halves. sums, early: by unit and name; published, corrected: by copy and name.
        correction: as for ``Batch``.
        uncounted: parameters that squared norms leave out.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        masters: Masters,
        sums: Mapping[Any, Mapping[str, torch.Tensor]],
        published: Sequence[Mapping[str, torch.Tensor]],
        corrected: Sequence[Mapping[str, torch.Tensor]] | None = None,
        correction: DelayCorrection | None = None,
        early: Mapping[Any, Mapping[str, torch.Tensor]] | None = None,
        uncounted: Collection[str] = (),
    ):
        self._early, self._uncounted = early, uncounted
        self.optimizer, self.masters, self._sums, self._published = optimizer, masters, sums, published
        self._corrected, self._correction = corrected or (), correction
        self._batches: dict[
            Hashable, tuple[list[torch.Tensor], list[tuple[Batch, list[str]]]]
        ] = {}  # by unit: the exp_avg tensors that the batches read, the batches with their names
        device = next(iter(masters.parameters.values())).device if masters else None
        self._zero = torch.zeros(1, dtype=torch.float64, device=device)

    @staticmethod
    def suits(optimizer: torch.optim.Optimizer, device: torch.device, dtypes: Iterable[torch.dtype] = ()) -> bool:
        """Whether the kernel can replace this optimizer on this device, for parameters and sums of these dtypes."""
        return (
            triton is not None
            and device.type == "cuda"
            and all(d in KINDS for d in dtypes)
            and all(_hyper(optimizer, g) for g in optimizer.param_groups)
        )

    def square(self, unit: Hashable, scale: float) -> torch.Tensor:
        """Parts of the squared norm of the unit's sums times ``scale``; see ``Batch.square``."""
        return self._concatenated(
            [batch.square(scale) for batch, names in self._batches_of(unit) if names[0] not in self._uncounted]
        )

    def update(
        self, unit: Hashable, options: Sequence[dict[str, Any]], scale: float, clip: torch.Tensor | None, copy: int | None
    ) -> torch.Tensor:
        """One step for a unit; see ``Batch.update``.

        Args:
            options: of each group, recorded at the step.
            copy: None: masters in halves stay in the same copy.
        """
        squares, newest = [], self.masters.newest
        for batch, names in self._batches_of(unit):
            hyper = _hyper(self.optimizer, options[batch.group])
            assert hyper is not None, "suits() has checked it"
            old = newest.get(names[0])
            parts = batch.update(hyper, scale, clip, old if copy is None else copy, old)
            squares += [parts] if names[0] not in self._uncounted else []
            if old is not None and copy is not None:
                newest.update(dict.fromkeys(names, copy))
        return self._concatenated(squares)

    def predict(
        self, unit: Hashable, options: Sequence[dict[str, Any]], scale: float, clip: torch.Tensor | None, copy: int
    ) -> None:
        """Predict a unit's next version; see ``Batch.predict``."""
        for batch, names in self._batches_of(unit):
            hyper = _hyper(self.optimizer, options[batch.group])
            assert hyper is not None, "suits() has checked it"
            batch.predict(hyper, scale, clip, copy, self.masters.newest.get(names[0]))

    def write_step_counts(self) -> None:
        """Write the step counts into the optimizer's state. The next update reads them again, since callers may change them."""
        for _, batches in self._batches.values():
            for batch, names in batches:
                for name in names:
                    state = self.optimizer.state[self.masters.parameters[name]]
                    state["step"] = state["step"].fill_(batch.count) if isinstance(state["step"], torch.Tensor) else batch.count
        self._batches.clear()

    def _concatenated(self, squares: list[torch.Tensor]) -> torch.Tensor:
        return squares[0] if len(squares) == 1 else torch.cat(squares) if squares else self._zero

    def _batches_of(self, unit: Hashable) -> list[tuple[Batch, list[str]]]:
        """The unit's batches; rebuilt if the optimizer's state tensors have been replaced (a checkpoint was loaded)."""
        state, masters, names = self.optimizer.state, self.masters.parameters, list(self._sums[unit])
        seen = [state[masters[n]].get("exp_avg") for n in names]
        known = self._batches.get(unit)
        if known is None or any(a is not b for a, b in zip(seen, known[0])):
            known = self._batches[unit] = self._make(unit)
        return known[1]

    def _make(self, unit: Hashable) -> tuple[list[torch.Tensor], list[tuple[Batch, list[str]]]]:
        groups = {p: k for k, g in enumerate(self.optimizer.param_groups) for p in g["params"]}
        deepspeeds = type(self.optimizer).__name__ == "FusedAdam"
        if deepspeeds:  # it counts steps in the state of a group's last parameter only
            counts = [
                max((self.optimizer.state[p].get("step", 0) for p in g["params"]), default=0) for g in self.optimizer.param_groups
            ]
        masters, lows = self.masters.parameters, self.masters.lows
        alike: dict[tuple, list[str]] = {}
        for name, total in self._sums[unit].items():
            master = masters[name]
            state = self.optimizer.state[master]
            if "exp_avg" not in state:
                state |= {
                    "step": 0 if deepspeeds else torch.zeros((), dtype=torch.float32, device="cpu"),
                    "exp_avg": torch.zeros_like(total, dtype=torch.float32),
                    "exp_avg_sq": torch.zeros_like(total, dtype=torch.float32),
                }
            count = int(state["step"]) or (counts[groups[master]] if deepspeeds else 0)
            key = groups[master], total.dtype, self._published[0][name].dtype, name in lows, name in self._uncounted, count
            alike.setdefault(key, []).append(name)
        batches = []
        for (group, *_, count), names in alike.items():
            states = [self.optimizer.state[masters[n]] for n in names]
            batch = Batch(
                group,
                [self._sums[unit][n] for n in names],
                [lows.get(n, masters[n].detach()) for n in names],
                [s["exp_avg"] for s in states],
                [s["exp_avg_sq"] for s in states],
                [[copy[n] for n in names] for copy in self._published],
                [[copy[n] for n in names] for copy in self._corrected],
                self._correction,
                [self._early[unit][n] for n in names] if self._early else (),
            )
            batch.count = count
            batches.append((batch, names))
        return [self.optimizer.state[masters[n]]["exp_avg"] for n in self._sums[unit]], batches


def _hyper(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Hyper | None:
    """A group's hyperparameters, or None if the kernel cannot apply them."""
    kind, lr = type(optimizer), group["lr"]
    if isinstance(lr, torch.Tensor) and lr.device.type != "cpu":
        return None
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        if group["amsgrad"] or group["maximize"] or group["capturable"] or group["differentiable"]:
            return None
        decoupled = kind is torch.optim.AdamW or bool(group.get("decoupled_weight_decay"))
    elif f"{kind.__module__}.{kind.__name__}" == "deepspeed.ops.adam.fused_adam.FusedAdam" and group["bias_correction"]:
        decoupled = getattr(optimizer, "adam_w_mode", None) == 1  # "type" is "AdamW", or "Adam" with adam_w_mode
    else:
        return None
    beta1, beta2 = map(float, group["betas"])
    return Hyper(float(lr), beta1, beta2, float(group["eps"]), float(group["weight_decay"]), decoupled)
