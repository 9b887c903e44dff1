"""``deepspeed-cdp doctor --model``: the plan that the engine makes of a model and a batch, and the reasons."""

import argparse
from typing import Any

from deepspeed_cdp.cli import models, settings
from deepspeed_cdp.cli.output import columns, human
from deepspeed_cdp.model import discover
from deepspeed_cdp.model.make_plan import find_for_batch, make_plan


def explain(args: argparse.Namespace) -> dict[str, Any]:
    """The plan as data, with the reason for each persistent parameter, and for a plan that differs from the model's definition.

    Raises:
        UserError, ValueError: the model or config cannot be planned.
    """
    ranks = args.ranks or 2
    config = settings.read(args.config, ranks, None, None)
    ring = ranks if config.cyclic.ring_size == "auto" else config.cyclic.ring_size
    loaded = models.load(args.model, config.dtype, args.micro_batch or config.micro_batch or 1, args.sequence, args.class_name)
    module, chosen = loaded.module, config.settings
    seen = discover.trace(module, loaded.example)
    trained = frozenset(n for n, p in module.named_parameters() if p.requires_grad)
    found, why = find_for_batch(module, trained, ring, chosen, seen)
    plan, _ = make_plan(module, trained, chosen, ring, ranks // ring, found)
    parameters, reasons = dict(module.named_parameters()), discover.why_persistent(module, found, seen)
    return {
        "model": loaded.name,
        "batch": loaded.batch,
        "ranks": ring,
        "rings": plan.rings,
        "followed": seen is not None,
        "any_order": found.any_order,
        "made_anew": why,
        "stages": [
            {
                "stage": stage,
                "owner": plan.schedule.owner(stage),
                "bytes": sum(plan.unit(i).p_bytes for i in plan.members(stage)),
                "units": [plan.unit(i).name for i in plan.members(stage) if plan.unit(i).name],
            }
            for stage in range(ring)
        ],
        "persistent": [
            {"name": name, "bytes": parameters[name].numel() * parameters[name].element_size(), "why": reasons[name]}
            for name in found.persistent
        ],
    }


def text(r: dict[str, Any]) -> str:
    """The result as text."""
    rings = f" in each of {r['rings']} rings" if r["rings"] > 1 else ""
    lines = [f"{r['model']}, micro-batch {r['batch']}, {r['ranks']} ranks{rings}", ""]
    if not r["followed"]:
        lines.append(
            "The forward cannot be followed without values. In training the first batch runs twice, once without gradients."
        )
    if r["made_anew"]:
        lines.append(f"The plan is made anew for the first batch, in which {r['made_anew']}.")
    if r["any_order"]:
        lines.append("Too few modules run once and in one order, so parameters stay for the whole step (cyclic.any_order).")
    rows = [("stage", "units", "from", "to", "owner", "parameters")]
    rows += [
        (x["stage"], str(len(x["units"])), x["units"][0], x["units"][-1], f"rank {x['owner']}", human(x["bytes"]))
        for x in r["stages"]
    ]
    lines += columns(rows, 4)
    if r["persistent"]:
        lines += ["", "These parameters are persistent: they are there for a whole micro-batch on every rank."]
        lines += columns([(x["name"], human(x["bytes"]), x["why"]) for x in r["persistent"]], 3)
    return "\n".join(lines)
