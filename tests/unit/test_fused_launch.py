"""optim/fused_adam.py: what Triton compiled at a batch's first launch is launched itself from then on, if it takes the same
arguments."""

import pytest
import torch

from deepspeed_cdp.optim import fused_adam


class Kernel:
    """A @triton.jit function, or what came of compiling one."""

    def __init__(self, name: str, calls: list[tuple], gives: "Kernel | None"):
        self.__name__, self.calls, self.gives = name, calls, gives

    def __getitem__(self, grid: tuple):
        def launch(*arguments, **options):
            self.calls.append((self.__name__, grid, arguments, options))
            return self.gives

        return launch


@pytest.mark.parametrize(
    ("takes", "interpreted", "second"), [(True, False, "compiled"), (False, False, "jit"), (True, True, "jit")]
)
def test_the_second_launch(monkeypatch, takes, interpreted, second):
    monkeypatch.setattr(fused_adam, "TAKES_CONSTANTS", takes)  # False before Triton 3.3
    calls: list[tuple] = []
    kernel = Kernel("jit", calls, None if interpreted else Kernel("compiled", calls, None))
    batch = object.__new__(fused_adam.Batch)
    full, tails = (torch.zeros(9, 2), torch.zeros(9), False), (torch.zeros(2, 2), torch.zeros(2), True)
    batch._parts, batch._compiled = [full, tails], {}
    table = torch.zeros(3)
    batch._launch(kernel, table, (1, 2), (7,))
    batch._launch(kernel, table, (3, 4), (7,))
    batch._parts = [tails]
    batch._launch(kernel, table, (5, 6), (8,))  # compiled anew for another constant
    options = {"num_warps": 4}
    first = [
        ("jit", (9, 1, 1), (table, *full[:2], 1, 2, 7, False), options),
        ("jit", (2, 1, 1), (table, *tails[:2], 1, 2, 7, True), options),
    ]
    then, given = ({}, torch.Tensor.data_ptr) if second == "compiled" else (options, lambda x: x)
    assert calls == [
        *first,
        (second, (9, 1, 1), (*map(given, (table, *full[:2])), 3, 4, 7, False), then),
        (second, (2, 1, 1), (*map(given, (table, *tails[:2])), 3, 4, 7, True), then),
        ("jit", (2, 1, 1), (table, *tails[:2], 5, 6, 8, True), options),
    ]
