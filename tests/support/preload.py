"""What the fork server imports once for all worker processes (see workers.py); imports and a loaded operator, nothing that runs.

A fork copies only the thread that calls it, so nothing here may start a thread, open a store or make a process group. Ranks that
are forked share a hash seed, and so the order of sets; ranks that launchers start do not (tests/clients, test_elastic.py).
"""

import gc
import os
import sys

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed.runtime.pipe.engine  # noqa: E402, F401
import deepspeed.runtime.zero.muon.original_muon  # noqa: E402, F401  (its torch.compile imports the compiler)
import torch  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402
from transformers import LlamaForCausalLM  # noqa: E402, F401

import deepspeed_cdp.integration.engine  # noqa: E402
import deepspeed_cdp.integration.pipe_engine  # noqa: E402, F401
from support import engine_work  # noqa: E402, F401

torch.set_num_threads(1)
get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)
threads = len(os.listdir("/proc/self/task"))
if threads != 1:
    sys.exit(f"support/preload.py has started {threads - 1} threads, which would be missing in every forked worker")
gc.collect()
gc.freeze()  # the workers' collections skip all this, and its pages stay shared
