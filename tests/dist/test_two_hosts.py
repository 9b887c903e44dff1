"""Two hosts, each a ring, over a link that tc slows down; skipped where network namespaces are not permitted."""

import pytest

from benchmarks.two_hosts import FIELDS, Unable, launch, summary, two_hosts
from support.patience import patience


@pytest.mark.slow
def test_a_ring_per_host_averages_over_the_link(tmp_path):
    """``auto`` makes a ring of each host; what crosses the link is a stage's sums once in each direction, not parameters."""
    try:
        hosts = two_hosts(200)
        prefixes = hosts.__enter__()
    except Unable as error:
        pytest.skip(f"two hosts cannot be had here: {error}")
    rows = tmp_path / "rows.csv"
    try:
        launch(
            prefixes,
            2,
            patience(400),
            "--engines=rings,ring",
            "--layers=2",
            "--sequence=16",
            "--steps=4",
            "--warmup=2",
            "--repeats=1",
            "--rounds=1",
            "--mbit=200",
            f"--rows={rows}",
        )
    finally:
        hosts.__exit__(None, None, None)
    found = {line.split(",")[0]: dict(zip(FIELDS, line.split(","))) for line in rows.read_text().splitlines()}
    assert set(found) == {"rings", "ring"} and found["rings"]["ranks"] == "4"
    psi = float(found["rings"]["parameters_mb"])
    for way in ("sent_mb", "received_mb"):  # sums of the window's last step may cross after it
        assert 0.5 * psi < float(found["rings"][way]) < 1.15 * psi
        assert float(found["ring"][way]) > 1.2 * float(found["rings"][way])
    assert "rings" in summary([found["rings"]])


def test_without_root_it_says_why(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(Unable, match="need root"):
        with two_hosts(100):
            pass
