"""N ranks' training in one process: cyclic data parallelism without several GPUs.

    theta_{t+1} = opt(theta_t, 1/N sum_r grad f_r(theta_hat_{r,t}))

where stage s of theta_hat_{r,t} is theta_t^s if r + s >= K, and theta_{t-1}^s, or its delay correction, otherwise. It simulates
learning exactly, and not time. A step runs the ranks' micro-batches one after the other, with the same results as the oracle,
``reference.train``.

Unlike the oracle, it is made for users: it takes an ordinary module, optimizer and scheduler on any device. It keeps two
copies of the parameters, three with a delay correction, and makes none per micro-batch. On GPUs it never synchronizes the host,
and can run as a CUDA graph (``captured``).

    stages = stages_of(model, ranks=4)
    ring = Simulator(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), stages, "cdp-v2")
    for batches in data:                                                   # one micro-batch per rank
        losses = ring.step(batches, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))

It does not need DeepSpeed. Two things are not simulated: fp16 loss scaling, and skipping non-finite steps under ``dp`` and
``cdp-v1``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from deepspeed_cdp.model import discover
from deepspeed_cdp.optim.delay_correction import Corrector, resolve
from deepspeed_cdp.plan.schedule import RULES

Loss = Callable[[nn.Module, Any], Tensor]
_EPSILON = 1e-6  # as in DeepSpeed's ZeRO-3 (stage3.py, unscale_and_clip_grads)


def stages_of(module: nn.Module, ranks: int, example: discover.Example | None = None, method: str = "auto") -> list[list[str]]:
    """The engine's stages of a model on ``ranks`` ranks: parameter names by stage.

    Args:
        example: arguments of one forward, which gives the order of units and their FLOPs.
        method: ``cyclic.partition_method``; ``auto`` is ``flops`` with an example, else ``parameters``.

    Raises:
        ValueError: the model has fewer units than ranks, or the method is unknown.
    """
    found = discover.find_units(module, ranks, example)
    groups = discover.stages(found, ranks, method)
    return [
        [*(found.persistent if s == 0 else ()), *(name for i in group for name in found.units[i].parameters)]
        for s, group in enumerate(groups)
    ]


def threshold_of(rule: str | int, ranks: int, stages: int) -> int:
    """The K of a rule: dp 0, cdp-v2 S-1, cdp-v1 R+S-1; with as many ranks R as stages S, that of ``schedule.threshold``.

    Raises:
        ValueError: not a rule, or K outside 0..R+S-1.
    """
    most = ranks + stages - 1
    if isinstance(rule, str) and rule in RULES:
        return {"dp": 0, "cdp-v2": stages - 1, "cdp-v1": most}[rule]
    if isinstance(rule, int) and not isinstance(rule, bool) and 0 <= rule <= most:
        return rule
    raise ValueError(
        f"rule is {rule!r}; allowed are {', '.join(map(repr, RULES))} or an integer K from 0 to {most} with {ranks} "
        f"ranks and {stages} stages; choose one of these"
    )


class Simulator:
    """A simulated ring of ranks.

    Attributes:
        module: the user's module. Between steps it holds theta_t and rank 0's buffers, so evaluation and saving need no change.
        optimizer: the user's optimizer.
        ranks: R, the number of micro-batches in flight.
        stages: S, the number of stages.
        threshold: K.
        correction: what stale readers read.
        steps: updates so far (t).
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        stages: Sequence[Sequence[str]],
        rule: str | int = "cdp-v2",
        *,
        ranks: int | None = None,
        warmup_steps: int = 0,
        clip: float = 0.0,
        delay_correction: str | Mapping[str, Any] = "auto",
    ):
        """
        Args:
            module: its parameters are the fp32 masters; for bf16, use ``torch.autocast`` in the loss.
            optimizer: over the module's parameters. Step a scheduler after ``step``.
            stages: parameter names by stage; each parameter with a gradient once (see ``stages_of``).
            rule: as ``cyclic.rule``.
            ranks: default: as many as stages, as in the engine. The paper's experiments have 8 ranks and 4 stages.
            warmup_steps: number of first steps under ``dp``; the step after them reads one version, as after a flush.
            clip: the largest gradient norm; 0: no clipping. Under rules other than ``dp`` and ``cdp-v1``, a stage is clipped by
                this step's norms of stages >= its own and the last step's norms of the others (docs/algorithm.md#norms).
            delay_correction: as ``cyclic.delay_correction``; ``"none"`` is the paper's rule.

        Raises:
            ValueError: a parameter is in no stage or in two, the rule is unknown, a number is out of range, or ``predict`` does
                not know this optimizer's momentum.
        """
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        listed = [n for stage in stages for n in stage if n in trained]
        if sorted(listed) != sorted(trained):
            odd = sorted(set(listed) ^ set(trained)) or sorted({n for n in listed if listed.count(n) > 1})
            raise ValueError(f"each parameter must be in exactly one stage; look at {odd}")
        if (ranks is not None and ranks < 1) or warmup_steps < 0 or clip < 0:
            raise ValueError(
                f"ranks is {ranks}, warmup_steps {warmup_steps} and clip {clip}; ranks must be at least 1 and the "
                "others at least 0; correct them"
            )
        self.module, self.optimizer = module, optimizer
        self.stages, self.ranks = len(stages), len(stages) if ranks is None else ranks
        self.threshold = threshold_of(rule, self.ranks, self.stages)
        self.warmup_steps, self.clip, self.steps = warmup_steps, clip, 0
        self._parameters = [[trained[n] for n in stage if n in trained] for stage in stages]
        self._fresh = [[p.data for p in stage] for stage in self._parameters]  # theta_t
        # The correction of theta_{t-1} ("none": theta_{t-1} itself); theta_0 at first
        self._stale = [[p.detach().clone() for p in stage] for stage in self._parameters]
        self._corrected = _flat(self._fresh)  # the correction of theta_t, which the next update makes stale
        self.correction = resolve(delay_correction, optimizer, self.threshold)
        self._corrector = Corrector(self.correction, optimizer)
        self._early: list[list[Tensor]] = []  # by stage, the gradients that predict the next version
        self._factors: list[Tensor | float] = [1.0] * len(stages)  # that the last update multiplied gradients with
        self._applied: list[dict[str, Any]] | None = None  # the options of the last update since a flush
        self._buffers = [b for b in module.buffers()]
        own = [b.data for b in self._buffers]
        self._ranks_buffers = [own, *([b.clone() for b in own] for _ in range(self.ranks - 1))]
        self._last: Tensor | None = None  # squared norms by stage of the step before

    @property
    def delayed(self) -> bool:
        """Whether the next step reads stale versions: not in the warm-up, nor under dp."""
        return self.steps >= self.warmup_steps and self.threshold > 0

    def is_fresh(self, round: int, rank: int, stage: int) -> bool:
        """Whether this micro-batch of the next step reads theta_t of the stage, in forward and backward."""
        if not self.delayed:
            return True
        return self.threshold < self.ranks + self.stages - 1 and (round > 0 or rank + stage >= self.threshold)

    def step(self, batches: Sequence[Any], loss: Loss) -> Tensor:
        """One update from one micro-batch per rank, or k per rank with gradient accumulation.

        Args:
            batches: R k micro-batches, all of round 0 first, then all of round 1, ...; rank 0's first in each.
            loss: ``loss(module, batch)`` is a scalar.

        Returns:
            The losses of the micro-batches, of shape (R k,), detached, on the module's device.
        """
        self._before()
        losses = self._gradients(batches, loss)
        self._update()
        self.optimizer.zero_grad(set_to_none=True)
        return losses

    @torch.no_grad()
    def flush(self) -> None:
        """The next step reads theta_t everywhere, as it does when the engine evaluates or saves."""
        self._applied, self._factors = None, [1.0] * self.stages
        self._corrected = _flat(self._fresh)
        torch._foreach_copy_(_flat(self._stale), self._corrected)

    def captured(self, batches: Sequence[Any], loss: Loss) -> Callable[[Sequence[Any]], Tensor]:
        """``step`` with all forwards and backwards in one CUDA graph, for small models, which are bound by the host.

        Capturing does not train. Run at least three steps before it, so that libraries have initialized.

        Args:
            batches: of the same structure, shapes, dtypes and device as those to come.
            loss: must not synchronize; random numbers come from the device's default generator.

        Returns:
            ``step(batches)``, valid while ``delayed`` keeps its present value. The next step overwrites its losses.
        """
        self._before()
        leaves, shape = tree_flatten(tree_map(lambda x: x.clone(), list(batches)))
        self.optimizer.zero_grad(set_to_none=True)
        graph, delayed = torch.cuda.CUDAGraph(), self.delayed
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            losses = self._gradients(tree_unflatten(leaves, shape), loss)
        gradients, early = [p.grad for p in _flat(self._parameters)], self._early

        def step(batches: Sequence[Any]) -> Tensor:
            self._before()
            if self.delayed != delayed:
                raise ValueError("the warm-up is over, but the captured step reads no stale versions; capture again")
            torch._foreach_copy_(leaves, tree_flatten(list(batches))[0])
            for parameter, gradient in zip(_flat(self._parameters), gradients):
                parameter.grad = gradient
            graph.replay()
            self._early = early
            self._update()
            return losses

        return step

    # ---- parts of a step --------------------------------------------------------------------------------------------------
    def _before(self) -> None:
        if self.steps == self.warmup_steps:  # the warm-up ends with a flush
            self.flush()

    def _gradients(self, batches: Sequence[Any], loss: Loss) -> Tensor:
        """Averages gradients over the ranks into every ``.grad``; a parameter without a gradient gets zeros."""
        rounds, odd = divmod(len(batches), self.ranks)
        if odd or not rounds:
            raise ValueError(f"got {len(batches)} micro-batches for {self.ranks} ranks; give as many for each rank")
        losses = []
        early: dict[int, list[Tensor]] = {}
        try:
            for q, batch in enumerate(batches):
                self._bind(*divmod(q, self.ranks))
                value = loss(self.module, batch)
                losses.append(value.detach())
                (value / rounds).backward()
                for stage in range(self.stages) if self._predicts and q // self.ranks == rounds - 1 else ():
                    if min(stage, self.ranks - 1) == q % self.ranks:
                        early[stage] = self._early_gradients(stage, q + 1, len(batches))
        finally:
            self._unbind()
        for parameter in _flat(self._parameters):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        torch._foreach_div_([p.grad for p in _flat(self._parameters)], self.ranks)
        self._early = [early[s] for s in sorted(early)]
        return torch.stack(losses)

    @property
    def _predicts(self) -> bool:
        """Whether stale readers read predictions, which are made during the step."""
        return self.correction.method == "predict" and self.delayed

    def _early_gradients(self, stage: int, count: int, micro_batches: int) -> list[Tensor]:
        """The stage's gradients averaged over the first ``count`` micro-batches of a step."""
        rounds = micro_batches // self.ranks
        return [torch.zeros_like(p) if p.grad is None else p.grad / (count / rounds) for p in self._parameters[stage]]

    def _bind(self, round: int, rank: int) -> None:
        """Point parameters and buffers at the versions that this micro-batch reads."""
        for s, stage in enumerate(self._parameters):
            for parameter, value in zip(stage, self._fresh[s] if self.is_fresh(round, rank, s) else self._stale[s]):
                parameter.data = value
        for buffer, value in zip(self._buffers, self._ranks_buffers[rank]):
            buffer.data = value
        torch.clear_autocast_cache()  # its keys are parameter objects, which stay the same

    def _unbind(self) -> None:
        for parameter, value in zip(_flat(self._parameters), _flat(self._fresh)):
            parameter.data = value
        for buffer, value in zip(self._buffers, self._ranks_buffers[0]):
            buffer.data = value

    @torch.no_grad()
    def _update(self) -> None:
        parameters = _flat(self._parameters)
        if self._predicts and self._applied is not None:  # theta_{t+1}, for the step to come
            for gradients, factor in zip(self._early, self._factors):
                if gradients:
                    torch._foreach_mul_(gradients, factor)
            self._corrected = self._corrector.predict(parameters, _flat(self._early), self._applied)
        if self.clip > 0:
            self._clip()
        torch._foreach_copy_(_flat(self._stale), self._corrected)
        extrapolates = self.correction.method == "extrapolate" and self.delayed
        before = [p.detach().clone() for p in parameters] if extrapolates else []
        self.optimizer.step()
        self._applied = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        self._corrected = self._corrector.extrapolate(parameters, before) if extrapolates else _flat(self._fresh)
        self.steps += 1

    def _clip(self) -> None:
        """Divide gradients by (norm + 1e-6) / clip if that is above one, as ZeRO-3 does."""
        now = torch.stack([_square(_gradients(stage)) for stage in self._parameters if stage])
        exact = not self.delayed or self.threshold == self.ranks + self.stages - 1
        last = torch.zeros_like(now) if self._last is None else self._last
        for at, s in enumerate(s for s, stage in enumerate(self._parameters) if stage):
            square = now.sum() if exact else now[at:].sum() + last[:at].sum()
            self._factors[s] = torch.clamp((square.sqrt() + _EPSILON) / self.clip, min=1.0).reciprocal().float()
            torch._foreach_mul_(_gradients(self._parameters[s]), self._factors[s])
        self._last = now


def _flat(stages: Sequence[Sequence[Any]]) -> list[Any]:
    return [item for stage in stages for item in stage]


def _gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _square(gradients: list[Tensor]) -> Tensor:
    """The squared norm, float64."""
    if gradients[0].device.type == "cpu":  # in double precision, as in the oracle
        return torch.stack([g.double().square().sum() for g in gradients]).sum()
    return torch.stack(torch._foreach_norm(gradients)).double().square().sum()
