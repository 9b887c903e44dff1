"""Plans: equal ones of a given size, and random ones for property tests."""

from hypothesis import strategies as st

from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.schedule import Schedule
from deepspeed_cdp.plan.unit_schedule import Unit

PERSISTENT_UNIT = Unit("", 0, ("tied",), (), 320, 192)


def make(
    ranks: int,
    k: int,
    rounds: int = 1,
    per_stage: int = 1,
    p_bytes: int = 1024,
    g_bytes: int = 2048,
    persistent: Unit | None = None,
    keep: bool = False,
    kind: type[Plan] = Plan,
    corrected: bool = False,
    predicts: bool = False,
) -> Plan:
    """A plan with equal units."""
    units = tuple(Unit(f"u{i}", i // per_stage, (f"w{i}",), (), p_bytes, g_bytes) for i in range(ranks * per_stage))
    return kind(Schedule(ranks, k, rounds), units, persistent, keep, delay_corrected=corrected or predicts, predicts=predicts)


@st.composite
def plans(draw: st.DrawFn, ranks: st.SearchStrategy[int], k: int | None = None, rounds: int | None = None) -> Plan:
    """Uneven stages of 1 to 5 units of uneven sizes, some frozen, with persistent parameters or without, keep_after_forward
    or not, with corrections or without, pulled more or fewer passes ahead."""
    n = draw(ranks)
    units: list[Unit] = []
    for stage in range(n):
        for _ in range(draw(st.integers(1, 5))):
            i, frozen = len(units), draw(st.integers(0, 4)) == 0
            units.append(
                Unit(
                    f"u{i}",
                    stage,
                    () if frozen else (f"w{i}",),
                    (f"w{i}",) if frozen else (),
                    draw(st.integers(1, 5000)),
                    0 if frozen else draw(st.integers(1, 9000)),
                )
            )
    persistent = draw(st.sampled_from([None, PERSISTENT_UNIT, Unit("", 0, (), ("frozen",), 64, 0)]))
    k = draw(st.integers(0, 2 * n - 1)) if k is None else k
    schedule, keep = Schedule(n, k, rounds or draw(st.integers(1, 3))), draw(st.booleans())
    correction = draw(st.sampled_from(["none", "extrapolate", "predict"]))
    corrects, predicts = correction != "none", correction == "predict"
    ahead = draw(st.sampled_from([2, 1, 3, 9]))
    return Plan(schedule, tuple(units), persistent, keep, prefetch_units=ahead, delay_corrected=corrects, predicts=predicts)
