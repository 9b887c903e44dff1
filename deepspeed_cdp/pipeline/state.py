"""Data of a pipeline rank: its stages, passes under way, the last finished step, the step's batches."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from deepspeed_cdp.pipeline.weights import Named
from deepspeed_cdp.transport.base import Ticket


@dataclass
class PipelineStage:
    """A stage as the runtime sees it.

    Attributes:
        run: (inputs, number of the micro-batch since training began) -> outputs.
        units: trained parameters by unit of the schedule.
        fixed: frozen parameters and buffers, the same on all replicas when training begins.
        backward_context: surrounds a backward, which may run forwards again (activation checkpointing).
    """

    run: Callable[[Any, int], Any]
    units: Mapping[int, Named]
    fixed: Mapping[str, Tensor]
    backward_context: Callable[[], AbstractContextManager] = nullcontext


@dataclass
class FinishedStep:
    """The last step that is finished everywhere."""

    step: int
    loss: Tensor  # float64 scalar, mean over the step's micro-batches
    squares: Tensor  # float64, [stages]: squared norms of the averaged gradients

    @property
    def norm(self) -> Tensor:
        return self.squares.sum().sqrt()


@dataclass
class Pass:
    """A micro-batch on a stage, from its input to its gradient."""

    inputs: Any
    outputs: Any = None
    sends: list[Ticket] | None = None  # of the outputs
    grads: list[Tensor] | None = None  # of the outputs that need one
    receives: list[Ticket] | None = None  # of the inputs, later of the outputs' gradients


class MicroBatchReader:
    """The step's micro-batches from an iterator; micro-batches that another rank computes are read and dropped."""

    def __init__(self, batches: Iterator[Any] | None, count: int):
        self._batches, self._count, self._read, self._last = batches, count, 0, None

    def get(self, micro: int) -> Any:
        while self._read <= micro:
            assert self._batches is not None, "a rank with the first or the last stage has an iterator"
            self._last = next(self._batches)
            self._read += 1
        return self._last

    def finish(self) -> None:
        """Advance the iterator to the end of the step."""
        self.get(self._count - 1)
