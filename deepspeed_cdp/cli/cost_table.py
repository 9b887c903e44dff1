"""``deepspeed-cdp costs``: Table 1 of the paper."""

import argparse

from deepspeed_cdp.analysis.paper_costs import Sizes, table
from deepspeed_cdp.cli.output import columns, human, show, size, whole

# the 1.35B Llama of docs/performance.md in bf16, micro-batch 4 of 2048 tokens: parameters, activations, one stage's output
DEFAULTS = ("2.52GiB", "17GiB", "32MiB")


def add(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--ranks", type=whole, default=4, help="N: micro-batches, stages and workers; default: 4")
    parser.add_argument(
        "--parameters",
        type=size,
        default=size(DEFAULTS[0]),
        help=f"Psi_P, bytes of all parameters; default: {DEFAULTS[0]}, 1.35e9 in bf16",
    )
    parser.add_argument(
        "--activations",
        type=size,
        default=size(DEFAULTS[1]),
        help="Psi_A, bytes that one micro-batch keeps "
        f"for its backward (deepspeed-cdp memory measures them); default: {DEFAULTS[1]}",
    )
    parser.add_argument(
        "--boundary",
        type=size,
        default=size(DEFAULTS[2]),
        help=f"Psi_int, bytes from one stage to the next; default: {DEFAULTS[2]}",
    )


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    sizes = Sizes(args.ranks, args.parameters, args.activations, args.boundary)
    rows = table(sizes)
    head = ("figure", "implementation", "devices", "activations", "parameters", "volume", "steps")
    body = [
        (r.figure, r.implementation, r.devices, human(r.activations), human(r.parameters), human(r.volume), r.steps) for r in rows
    ]
    forms = [(r.figure, r.implementation, *r.forms.values()) for r in rows]
    text = "\n".join(
        [
            f"Table 1 for N = {sizes.n}, Psi_P = {human(sizes.psi_p)}, Psi_A = {human(sizes.psi_a)}, Psi_int = "
            f"{human(sizes.psi_int)}; bytes per device",
            "",
            *columns([head, *body], 2),
            "",
            *columns([head, *forms], 7),
            "",
            "volume: bytes a device receives in a step; steps: the most message rounds between two time steps",
        ]
    )
    result = {
        "ranks": sizes.n,
        "psi_p": sizes.psi_p,
        "psi_a": sizes.psi_a,
        "psi_int": sizes.psi_int,
        "rows": [r.as_dict() for r in rows],
    }
    show(result, text, args.json)
    return 0
