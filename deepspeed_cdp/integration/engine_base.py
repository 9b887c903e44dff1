"""What both engines (engine.py, pipe/engine.py) share: all ranks have the same settings, and hear of a failure."""

import atexit
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from deepspeed_cdp.errors import CheckpointError
from deepspeed_cdp.transport.base import Transport
from deepspeed_cdp.version import __version__


class EngineBase:
    """Part of an engine. An engine that has failed, or is destroyed while an exception is under way, closes its transport without
    waiting for the others, who learn of it from the closed connection."""

    _transport: Transport | None = None
    _failed = False

    def _compare(self, mine: dict[str, Any]) -> None:
        """Collective: all ranks have the same, by name of the setting, and run the same package.

        Raises:
            ValueError: on every rank that differs from another, with the first setting that does.
        """
        assert self._transport is not None
        mine, rank = {"deepspeed_cdp version": __version__, **mine}, self._transport.rank
        everyone = self._transport.gather(mine, f"rank {rank}, comparing settings between ranks")
        for key, value in mine.items():
            for other, theirs in enumerate(everyone):
                if theirs.get(key) != value:
                    raise ValueError(
                        f"{key} is {value!r} on rank {rank} but {theirs.get(key)!r} on rank {other}; start every "
                        "rank with the same config, model and package versions"
                    )

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError:  # on all ranks, and nothing was changed: training may go on
            raise
        except BaseException:
            self._failed = True  # peers must learn of it from a closed connection, not from their timeout
            raise

    @property
    def _is_well(self) -> bool:
        """Whether the others may be waited for."""
        return not self._failed and not isinstance(sys.exc_info()[1], Exception)


def check_number(loss: Any, step: int) -> None:
    """Raises ValueError unless a loss is a tensor of one number."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        raise ValueError(f"the loss of step {step} is {what}; give engine.backward() a tensor of one number, such as loss.mean()")


def close_at_exit(engine: Any) -> None:
    """A script may simply end: its neighbours still need its last hand-offs (unless it ends by an error)."""
    reference = weakref.ref(engine)

    def close() -> None:
        live = reference()
        if live is not None:
            live._failed = live._failed or getattr(sys, "last_value", None) is not None
            live.destroy()

    atexit.register(close)
