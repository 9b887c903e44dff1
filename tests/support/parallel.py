"""Which tests run beside each other under pytest-xdist: ``pytest -n 3``, as ``make test`` does on two cores.

A third worker fills the cores while tests wait for timeouts. CLOCKS, the tests that mostly wait, run on one worker from their
beginning to their end, and begin at once. All others go file by file to whichever worker is free: dist, launches, clients, unit.

(``--dist loadgroup`` would do, but xdist 3.8 does not find its groups under pytest 9.2.)
"""

from typing import Any

ORDER = ("clocks", "dist", "launches", "clients", "unit")
CLOCKS = ("test_faults.py", "test_transport_gloo.py", "test_engine_failures.py", "test_frozen.py")
LAUNCHES = ("test_elastic.py", "test_two_hosts.py", "test_install.py")  # in dist, without its pool
LONGEST = ("test_docs_cli.py", "test_rings.py", "test_runtime.py", "test_offload.py", "test_replicas.py", "test_plan.py")
TRACES = ("test_docs_cli.py", "test_simulation_measured.py")  # trace the same large models, once


def group(nodeid: str) -> str:
    """One of ORDER, or another folder."""
    *_, folder, file = nodeid.split("::")[0].split("/")
    if folder == "dist":
        return "clocks" if file in CLOCKS else "launches" if file in LAUNCHES else folder
    return folder


def place(nodeid: str) -> tuple[int, int]:
    """The key by which tests are sorted."""
    name, file = group(nodeid), nodeid.split("::")[0].split("/")[-1]
    return (
        ORDER.index(name) if name in ORDER else len(ORDER),
        (*LONGEST, *TRACES).index(file) if file in LONGEST + TRACES else len(LONGEST),
    )


def scheduler(config: Any, log: Any = None) -> Any:
    """Gives out groups in the order of the tests."""
    from xdist.scheduler import LoadScopeScheduling  # not everybody who runs a test has it

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            name, file = group(nodeid), nodeid.split("::")[0].split("/")[-1]
            return name if name == "clocks" else "traces" if file in TRACES else f"{name}/{file}"

    config.option.loadscopereorder = False
    return Groups(config, log)
