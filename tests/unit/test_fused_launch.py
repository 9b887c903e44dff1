"""fused.py: what Triton compiled at a batch's first launch is launched itself from then on, if it takes the same arguments."""

import pytest

from deepspeed_cdp import fused


class Kernel:
    """A @triton.jit function, or what came of compiling one."""

    def __init__(self, name: str, calls: list[tuple], gives: "Kernel | None"):
        self.__name__, self.calls, self.gives = name, calls, gives

    def __getitem__(self, grid: tuple):
        def launch(*arguments, **options):
            self.calls.append((self.__name__, grid, arguments, options))
            return self.gives
        return launch


@pytest.mark.parametrize(("takes", "interpreted", "second"),
                         [(True, False, "compiled"), (False, False, "jit"), (True, True, "jit")])
def test_the_second_launch(monkeypatch, takes, interpreted, second):
    monkeypatch.setattr(fused, "TAKES_CONSTANTS", takes)  # False before Triton 3.3
    calls: list[tuple] = []
    kernel = Kernel("jit", calls, None if interpreted else Kernel("compiled", calls, None))
    batch = object.__new__(fused.Batch)
    batch._grids, batch._compiled = {False: (2, 1, 1), True: (9, 1, 1)}, {}
    batch._launch(kernel, False, (1, 2), (True,))
    batch._launch(kernel, True, (3, 4), (True,))
    batch._launch(kernel, True, (5, 6), (False,))  # compiled anew for another constant
    options = {"num_warps": 16}
    assert calls == [("jit", (2, 1, 1), (1, 2, True), options),
                     (second, (9, 1, 1), (3, 4, True), options if second == "jit" else {}),
                     ("jit", (9, 1, 1), (5, 6, False), options)]
