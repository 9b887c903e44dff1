"""Runs example scripts, unchanged, one after the other in the processes that a launcher has started:
client_driver.py JOBS.json

Starting Python with torch, transformers and DeepSpeed takes longer than the jobs.
"""

import faulthandler
import gc
import json
import os
import runpy
import signal
import sys
from pathlib import Path


def main() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # who waits for us in vain sends it
    from accelerate.state import AcceleratorState, PartialState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    jobs = json.loads(Path(sys.argv[-1]).read_text())
    destroy_process_group = PartialState.destroy_process_group
    for job in jobs:
        # DeepSpeed keeps the groups it has seen, so only the last script may destroy them
        PartialState.destroy_process_group = destroy_process_group if job is jobs[-1] else lambda *_: None
        PartialState(cpu=True)  # without it Accelerate takes a machine without a GPU for a single process (the Trainer does this)
        os.environ.update(job["environment"])
        sys.argv = [job["script"], *job["arguments"]]
        print("job", sys.argv, flush=True)
        runpy.run_path(job["script"], run_name="__main__")
        AcceleratorState._reset_state(reset_partial_state=True)
        unset_hf_deepspeed_config()
        gc.collect()


if __name__ == "__main__":
    main()
