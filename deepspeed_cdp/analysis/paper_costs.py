"""Table 1 of the paper as functions: memory, traffic and devices for N micro-batches, with and without the cyclic schedule.

It needs no torch. Symbols, as in the paper:

=========  ==========================================================================================================
N          micro-batches in flight = stages of the model = workers
Psi_P      bytes of the model's parameters
Psi_A      bytes of the activations that one micro-batch saves for its backward, whole model
Psi_int    bytes of the activations between two stages, for one micro-batch
=========  ==========================================================================================================

Columns:

- *activations*, *parameters*: bytes on the device with the most. Stages are equal. Gradients and optimizer state come on top.
  In a pipeline this device is the first stage, with N micro-batches in flight; the last stage has one, Psi_A/N.
- *volume*: bytes that a device receives in a training step. An all-reduce counts as a reduce-scatter and an all-gather, as in the
  ZeRO paper, so ZeRO-DP is 3 Psi_P. Factors (N-1)/N are left out, since they approach one.
- *steps*: the most consecutive message rounds between two time steps, where a time step is the pass of one stage. A collective
  over N devices takes about log2 N, a message to a neighbour one.

Rows have the names of the paper's Figure 2: 2.a single device, 2.b devices with whole models, 2.c model and pipeline parallelism,
2.d ZeRO-DP; i. simultaneous, ii. cyclic.
"""

from dataclasses import asdict, dataclass
from math import ceil, log2
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """Arguments of the closed forms.

    Attributes:
        n: N, at least 1.
        psi_p, psi_a, psi_int: bytes, see the module's docstring.
    """

    n: int
    psi_p: float
    psi_a: float
    psi_int: float = 0.0


@dataclass(frozen=True)
class Cost:
    """One row of Table 1.

    Attributes:
        figure: its panel of Figure 2.
        implementation: in words.
        cyclic: micro-batches follow one another with a delay.
        devices: number of devices.
        activations, parameters, volume: bytes per device, see the module's docstring.
        steps: the most message rounds between two time steps.
        forms: the same columns as formulas.
    """

    figure: str
    implementation: str
    cyclic: bool
    devices: int
    activations: float
    parameters: float
    volume: float
    steps: int
    forms: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def cyclic_activations(n: int) -> float:
    """Activations of N micro-batches on one device under the cyclic schedule, in Psi_A (Section 4.1).

    At any time, the micro-batches hold 1/N, 2/N, ..., N/N of the model's activations. The sum is constant, and about N/2.
    """
    return (n + 1) / 2


def collective_steps(n: int) -> int:
    """Message rounds of a tree collective over n devices: log2 n, rounded up."""
    return ceil(log2(n)) if n > 1 else 0


def table(sizes: Sizes) -> list[Cost]:
    """The nine rows of Table 1, in the paper's order.

    Raises:
        ValueError: N below 1, or a negative size.
    """
    n, p, a, i = sizes.n, sizes.psi_p, sizes.psi_a, sizes.psi_int
    if n < 1:
        raise ValueError(f"N is {n}; allowed is a number of workers of at least 1; give one")
    for name, value in (("psi_p", p), ("psi_a", a), ("psi_int", i)):
        if value < 0:
            raise ValueError(f"{name} is {value}; allowed are bytes of at least 0; give its size")
    tree, hop, many = collective_steps(n), int(n > 1), int(n > 1)
    half = cyclic_activations(n)
    sums, passed = 2 * p * many, 2 * i * many

    def row(figure, what, cyclic, devices, activations, parameters, volume, steps, *forms):
        names = ("devices", "activations", "parameters", "volume", "steps")
        return Cost(figure, what, cyclic, devices, activations, parameters, volume, steps, dict(zip(names, forms)))

    return [
        row("2.a.i", "single device, DP", False, 1, n * a, p, 0, 0, "1", "N Psi_A", "Psi_P", "0", "0"),
        row("2.a.ii", "single device, DP + cyclic", True, 1, half * a, p, 0, 0, "1", "(N+1)/2 Psi_A", "Psi_P", "0", "0"),
        row("2.b.i", "several devices, DP", False, n, a, p, sums, tree, "N", "Psi_A", "Psi_P", "2 Psi_P", "log2 N"),
        row("2.b.ii", "several devices, DP + cyclic", True, n, a, p, sums, hop, "N", "Psi_A", "Psi_P", "2 Psi_P", "1"),
        row(
            "2.c.i",
            "DP + model parallelism",
            False,
            n * n,
            a / n,
            p / n,
            sums / n + passed,
            tree,
            "N^2",
            "Psi_A/N",
            "Psi_P/N",
            "2 Psi_P/N + 2 Psi_int",
            "log2 N",
        ),
        row(
            "2.c.ii",
            "DP + model parallelism + cyclic",
            True,
            n * (n + 1) // 2,
            a / n,
            p / n,
            sums / n + passed,
            hop,
            "N(N+1)/2",
            "Psi_A/N",
            "Psi_P/N",
            "2 Psi_P/N + 2 Psi_int",
            "1",
        ),
        row(
            "2.c.iii",
            "pipeline parallelism (cyclic)",
            True,
            n,
            a,
            p / n,
            n * passed,
            hop,
            "N",
            "Psi_A (first stage)",
            "Psi_P/N",
            "2 N Psi_int",
            "1",
        ),
        row("2.d.i", "ZeRO-DP", False, n, a, p / n, 3 * p * many, tree, "N", "Psi_A", "Psi_P/N", "3 Psi_P", "log2 N"),
        row("2.d.ii", "ZeRO-DP + cyclic", True, n, a, p / n, 3 * p * many, hop, "N", "Psi_A", "Psi_P/N", "3 Psi_P", "1"),
    ]
