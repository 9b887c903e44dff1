"""``deepspeed-cdp doctor --model``: the plan that the engine makes of a model and a batch, and the reasons."""

import argparse
from typing import Any

from deepspeed_cdp.cli.output import columns, human
from deepspeed_cdp.cli.prediction import planned
from deepspeed_cdp.model.discover import why_persistent


def explain(args: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """The plan as data, with the reason for each persistent parameter, and for a plan that differs from the model's definition.

    Raises:
        UserError, ValueError: the model or config cannot be planned.
    """
    _, loaded, trace, found, made_anew, plan, _ = planned(args, ranks)
    parameters, reasons = dict(loaded.module.named_parameters()), why_persistent(loaded.module, found, trace)
    return {
        "model": loaded.name,
        "batch": loaded.batch,
        "ranks": plan.schedule.ranks,
        "rings": plan.rings,
        "followed": trace is not None,
        "any_order": found.any_order,
        "made_anew": made_anew,
        "stages": [
            {
                "stage": stage,
                "owner": plan.schedule.owner(stage),
                "bytes": sum(plan.unit(i).p_bytes for i in plan.members(stage)),
                "units": [plan.unit(i).name for i in plan.members(stage) if plan.unit(i).name],
            }
            for stage in range(plan.schedule.ranks)
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
