"""Three ranks as threads whose layers sleep, recorded: a ring to look at. ``python docs/slow_ring.py FOLDER`` writes traces."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402

from benchmarks.pauses import SlowLinear  # noqa: E402
from deepspeed_cdp.model.make_plan import Settings  # noqa: E402
from deepspeed_cdp.runtime import trace  # noqa: E402
from deepspeed_cdp.runtime.runtime import Runtime  # noqa: E402
from support.local_ring import run_ranks  # noqa: E402

RANKS, STEPS, FORWARD = 3, 6, 0.01  # seconds of a unit's forward; its backward takes twice that


def main(folder: str) -> None:
    """Train, record the last steps, write a file per rank."""
    built = [torch.nn.Sequential(*[SlowLinear(8, FORWARD) for _ in range(2 * RANKS)]) for _ in range(RANKS)]

    def work(rank, transport):
        module = built[rank]
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        runtime = Runtime(module, optimizer, Settings(), transport, torch.device("cpu"))
        recorder = None
        for step in range(STEPS):
            if step == STEPS - 3:
                recorder = trace.Recorder(runtime.executor, torch.device("cpu"))
            with runtime.forward():
                loss = module(torch.randn(4, 8)).pow(2).mean()
            loss.backward()
            runtime.end_backward()
            runtime.step()
        trace.write(trace.file_of(f"{folder}/trace.json", rank), recorder.stop())
        runtime.close(True)

    run_ranks(RANKS, work)


if __name__ == "__main__":
    main(*sys.argv[1:])
