"""A short text report of a run."""

from deepspeed_cdp.runtime.runtime import Runtime


def report(engine: str, runtime: Runtime) -> str:
    """Collective: engine, rule, stages and their sizes; messages counted in the last step beside their closed forms.

    Args:
        engine: name of the engine's class.
    """
    plan, s = runtime.plan, runtime.plan.schedule
    where = f"rank {runtime.transport.world_rank}, engine.report(), which every rank must call"
    everyone = runtime.transport.gather(
        {
            "traffic": runtime.counters.traffic(),
            "messages": runtime.counters.messages(),
            "collectives": runtime.counters.collectives(),
            "bytes": runtime.executor.buffers.nbytes(),
        },
        where,
    )
    psi = sum(u.p_bytes for u in (*plan.units, *([plan.persistent] if plan.persistent else [])))
    lines = [
        f"engine      {engine} over {runtime.transport.name}",
        f"rule        {runtime.settings.rule} (K = {s.threshold}) on {s.ranks} ranks, {s.rounds} micro-batch(es) per rank "
        "and step" + (f"; {plan.rings} such rings" if plan.rings > 1 else ""),
        f"model       {psi / 2**20:.1f} MiB of parameters in {len(plan.units)} units"
        + (
            f" and {len(plan.persistent.trainable) + len(plan.persistent.frozen)} persistent parameter(s)"
            if plan.persistent
            else ""
        ),
        "",
    ]
    rows: list[tuple[str, ...]] = [("stage", "owner", "units", "MiB", "from", "to")]
    for stage in range(s.ranks):
        units = [u for u in plan.units if u.stage == stage]
        size = sum(u.p_bytes for u in units) + (plan.persistent.p_bytes if plan.persistent and stage == 0 else 0)
        rows.append((str(stage), f"rank {s.owner(stage)}", str(len(units)), f"{size / 2**20:.2f}", units[0].name, units[-1].name))
    lines += _table(rows) + [""]
    kinds = {"F + B": "", "G": "", "O": ""}  # by kind of traffic, what the heading adds for it
    if plan.rings > 1:
        kinds["X"] = "; X: from other rings"
    heads = [head for kind in kinds for head in (f"{kind} MiB", "closed form")]
    rows = [("rank", "messages", *heads, "collectives", "buffers MiB")]
    for rank, x in enumerate(everyone):
        t = x["traffic"]
        cells = [f"{t[k][c] / 2**20:.3f}" if t else "-" for k in kinds for c in ("counted", "closed form")]
        rows.append((str(rank), str(x["messages"]), *cells, str(x["collectives"]), f"{x['bytes'] / 2**20:.2f}"))
    added = "".join(kinds.values())
    sums = "G: running gradient sums; O: those that come back to their owner"
    lines.append(f"received in the last step (F, B: parameters; {sums}{added}):")
    return "\n".join(lines + _table(rows))


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows]
