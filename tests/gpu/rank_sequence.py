"""One rank of the GPU checks of sequence parallelism in groups of two: stock ZeRO-3's weights under dp, else the oracle's.

With two ranks rings have one rank, with four they have two:

    torchrun --nproc-per-node 2 tests/gpu/rank_sequence.py [--transport peer|nccl] [--cpu]
"""

import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from support.engine_work import farthest, unpack  # noqa: E402
from support.gpu_runs import Verdict  # noqa: E402
from support.rank_tools import Tools, finish, parser, run_cases  # noqa: E402
from support.sequence_work import Job, oracle, run_jobs  # noqa: E402

LEAST = 5e-5  # parts of a sequence are added in another order than whole ones, and on GPUs than on a CPU; rules differ by more


def main() -> None:
    tools = Tools(parser(__doc__, 200).parse_args())
    clipped = {"rounds": 2, "clip": 0.3}
    jobs = [
        Job(None, **clipped),
        *(
            Job(rule, cyclic={"transport": tools.transport, "timeout_seconds": tools.timeout}, **options)
            for rule, options in (("dp", clipped), ("cdp-v2", {**clipped, "optimizer": "groups"}), ("cdp-v1", {"clip": 0.3}))
        ),
    ]
    with tools.limit("training", tools.ends - time.monotonic()):
        theirs, *ours = run_jobs(tools.rank, tools.size, jobs)

    def verdict(job: Job, run: dict[str, Any]) -> Verdict:
        if job.rule == "dp":
            losses, weights = theirs["losses"], unpack(theirs["state"])
        else:
            want = oracle(job, run["stages"], tools.size)
            losses, weights = want.losses, want.masters
        figures = {
            "losses": max(abs(loss - losses[place]) / losses[place] for place, loss in run["losses"].items()),
            "weights": farthest(unpack(run["state"]), weights),
            "ring, place, rings": run["rings"],
            "collectives": run["collectives"],
        }
        return max(figures["losses"], figures["weights"]) < LEAST and not run["collectives"], figures

    cases = {job.rule: lambda tools, job=job, run=run: verdict(job, run) for job, run in zip(jobs[1:], ours)}
    finish(tools, run_cases(tools, cases, 90))


if __name__ == "__main__":
    main()
