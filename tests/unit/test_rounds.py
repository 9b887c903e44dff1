"""Message rounds between two time steps, from logs that are made up; and the page of Table 1 against its recorded rows."""

import csv

import pytest

from benchmarks import table1
from benchmarks.rounds import Event, Rounds, longest


def push(at: int, peer: int, nbytes: int = 1000, stream: str = "P") -> Event:
    return Event(at, "push", nbytes, stream, peer)


def land(at: int, peer: int, nbytes: int = 1000, stream: str = "P") -> Event:
    return Event(at, "land", nbytes, stream, peer)


def along(ats: list[int], gap: int) -> list[list[Event]]:
    """A message from rank to rank; each rank sends it on ``gap`` time steps after it came."""
    logs = [[push(ats[0], 1)]]
    for rank in range(1, len(ats)):
        logs.append([land(ats[rank], rank - 1), push(ats[rank] + gap, rank + 1)])
    logs[-1].pop()
    return logs


@pytest.mark.parametrize("common", [False, True])
def test_messages_that_no_time_step_interrupts_follow_one_another(common):
    assert longest(along([5] * 4, 0), [0] * 4, common) == Rounds(3, 3, 0)
    logs = [[push(5, 1)], [land(5, 0), push(6, 2)], [land(6, 1)]]
    assert longest(logs, [0] * 3, common) == Rounds(1, 1, 0)


def test_a_message_that_had_a_time_step_to_come_starts_anew_where_time_is_common():
    logs = along([2, 4, 6, 8], 0)  # forwarded on arrival, each time two time steps later
    assert longest(logs, [0] * 4, True) == Rounds(1, 1, 0)
    assert longest(logs, [0] * 4, False) == Rounds(3, 3, 0)


def test_collectives_are_counted_and_their_rounds_are_the_model():
    log = [Event(1, "collective", 10, "allreduce_", 8), Event(1, "collective", 10, "broadcast_", 5), push(1, 1)]
    assert longest([log, [land(1, 0)]], [0, 0], False) == Rounds(3 + 3 + 1, 1, 2)


def test_what_is_small_or_before_the_beginning_does_not_count_but_is_followed():
    logs = [[push(0, 1, 8), push(1, 1), push(2, 1)], [land(0, 0, 8), land(1, 0), land(2, 0)]]
    assert longest(logs, [0, 0], True) == longest(logs, [0, 0], True, least=9) == Rounds(1, 1, 0)
    assert longest(logs, [0, 3], True) == Rounds()
    assert longest([log[:1] for log in logs], [0, 0], True, least=9) == Rounds()


def test_a_message_that_no_rank_sent_is_refused():
    with pytest.raises(ValueError, match=r"rank 1 waits for a message of rank 0 \(stream P, step 1\)"):
        longest([[], [land(1, 0)]], [0, 0], True)


def test_the_page_shows_the_recorded_rows():
    page = table1.PAGE.read_text()
    shown = table1.BLOCK.findall(page)
    assert [n for _, _, n in shown] == ["4", "3"]
    assert table1.render(page) == page, "docs/table1.md is stale: run python -m benchmarks.table1 --write"
    with (table1.ROOT / shown[0][1]).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(r["figure"], r["n"]) for r in rows} == {(f, n) for f in table1.SYSTEMS for n in "34"}
    for n in (3, 4):
        most = {f: table1.most(rows, f, n) for f in table1.SYSTEMS}
        forms = {f: table1.cost(f, n) for f in table1.SYSTEMS}
        assert all(most[f]["devices"] == forms[f].devices for f in forms)
        assert all(most[f]["activations"] == forms[f].activations for f in forms if f != "2.a.ii")
        assert most["2.a.ii"]["activations"] == -(-n * n // 2) * table1.sizes(n).psi_a / n
        for f in ("2.b.i", "2.b.ii", "2.c.i", "2.c.iii", "2.d.i"):
            assert 0 <= most[f]["volume"] - forms[f].volume <= most[f]["scalars"], "as docs/table1.md says"
        assert [f for f in forms if most[f]["rounds"] != forms[f].steps] == ["2.c.ii", "2.d.i"]
        assert most["2.c.i"]["collectives"] == 1 and most["2.c.i"]["parameters"] == forms["2.c.i"].parameters
