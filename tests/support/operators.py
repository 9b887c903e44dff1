"""Builds the operators that DeepSpeed compiles on first use, and this package's extensions.

``python tests/support/operators.py``, from ``make``'s set-up.

They lie in TORCH_EXTENSIONS_DIR, which the Makefile and tests/conftest.py set to a folder of the virtual environment.
"""

import os
from concurrent.futures import ThreadPoolExecutor


def build() -> None:
    """Build what the tests and the demo need on CPUs, if it is not there: its shared-memory communication, and its CPU Adam."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, ShareMemCommBuilder

    from deepspeed_cdp.native import load

    with ThreadPoolExecutor(2) as threads:
        builds = [threads.submit(builder().load, verbose=False) for builder in (ShareMemCommBuilder, CPUAdamBuilder)]
        builds += [threads.submit(load.load, extension) for extension in (load.MESSAGES, load.AUTOGRAD)]
        for done in builds:
            done.result()


if __name__ == "__main__":
    build()
