"""Which tests run beside each other when pytest-xdist has two workers: ``pytest -n 2``, as ``make test`` does.

Tests in dist start ranks as processes. They are one group, which one worker runs from its beginning to its end: they share a pool
of ranks, and their clocks have one other busy process beside them until ``clients`` begin. They take longest and start at once,
those with the tightest clocks first. The other worker takes the files of unit one by one, then the launches of clients and a few
of dist that make processes of their own; limits are wide there. (``--dist loadgroup`` would do, but xdist 3.8 does not find its
groups under pytest 9.2.)
"""

from typing import Any

from xdist.scheduler import LoadScopeScheduling

ORDER = ("dist", "unit", "clients")
CLOCKS = ("test_faults.py", "test_transport_gloo.py", "test_engine_failures.py")
LAUNCHES = ("test_elastic.py", "test_two_hosts.py", "test_install.py")  # of dist, without the pool
TRACES = ("test_docs_cli.py", "test_simulation_measured.py")  # trace the same large models, once


def _split(nodeid: str) -> tuple[str, str]:
    """What it counts as, and its file."""
    *_, folder, file = nodeid.split("::")[0].split("/")
    return "clients" if file in LAUNCHES else folder, file


def place(nodeid: str) -> tuple[int, bool, bool]:
    """The key by which tests are sorted."""
    folder, file = _split(nodeid)
    return ORDER.index(folder) if folder in ORDER else len(ORDER), file not in CLOCKS, file not in TRACES


class Groups(LoadScopeScheduling):
    """Gives out groups in the order of the tests."""

    def __init__(self, config: Any, log: Any = None):
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        folder, file = _split(nodeid)
        return folder if folder == "dist" else "traces" if file in TRACES else f"{folder}/{file}"
