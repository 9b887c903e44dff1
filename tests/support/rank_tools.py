"""What the scripts under torchrun share: a device that is a GPU or, to prove a script without one, the CPU; time limits; figures.

On a hang every rank shows the Python stacks of its threads and what its transports wait for, and ends.
"""

import argparse
import faulthandler
import gc
import json
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from support import models  # noqa: E402
from support.gpu_places import shares_gpu, take_gpu  # noqa: E402

HUNG = 3  # exit code of a rank that ran into a time limit


class Tools:
    """One rank's surroundings.

    Attributes:
        cuda: whether on a GPU; device, rank, size: this rank's.
        transport: of the ``cyclic`` block.
    """

    def __init__(self, arguments: argparse.Namespace):
        self.cuda = not arguments.cpu
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.transport, self.timeout = arguments.transport, arguments.timeout
        self.ends = time.monotonic() + arguments.budget
        self.engines: list[Any] = []  # those made and not destroyed, for diagnose
        if not self.cuda:
            os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        import deepspeed_cdp

        deepspeed_cdp.register()
        if self.cuda:
            self.device, backend = take_gpu()
            torch.backends.cuda.enable_flash_sdp(False)  # their backwards add in any order
            torch.backends.cuda.enable_mem_efficient_sdp(False)
        else:
            self.device, backend = torch.device("cpu"), "gloo"
            torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # a kernel per allocation, for nothing here
        if backend == "gloo":  # DeepSpeed would bind the GPU to it; torch then fails to make groups of some ranks
            torch.distributed.init_process_group(backend)
        deepspeed.init_distributed(backend)

    def say(self, text: str) -> None:
        """Print on rank 0, at once."""
        if self.rank == 0:
            print(text, flush=True)

    # ---- engines --------------------------------------------------------------------------------------------------------
    def engine(
        self, module: torch.nn.Module, rule: str | int = "cdp-v2", config: dict[str, Any] | None = None, lr: float = 1e-3
    ) -> Any:
        """The engine of a module on this device, with AdamW."""
        import deepspeed

        module = module.to(self.device)
        optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=lr, foreach=True)
        whole = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 3},
            "steps_per_print": 10**9,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            **(config or {}),
        }
        cyclic = {"enabled": True, "rule": rule, "transport": self.transport, "timeout_seconds": self.timeout}
        whole["cyclic"] = cyclic | whole.get("cyclic", {})
        engine = deepspeed.initialize(model=module, optimizer=optimizer, config=whole)[0]
        self.engines.append(engine)
        return engine

    def destroy(self, engine: Any) -> None:
        """``engine.destroy()``."""
        self.engines.remove(engine)
        engine.destroy()

    def batches(self, kind: str, steps: int, rounds: int = 1, dtype: torch.dtype | None = None) -> torch.Tensor:
        """[steps, rounds, ...] micro-batches of this rank, on its device: a copy inside the loop would synchronize."""
        each = [torch.stack([models.batch(kind, t, m, self.rank) for m in range(rounds)]) for t in range(steps)]
        data = torch.stack(each).to(self.device)
        return data.to(dtype) if dtype is not None and data.is_floating_point() else data

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    # ---- figures --------------------------------------------------------------------------------------------------------
    def settled_memory(self) -> dict[str, int]:
        """``memory`` once garbage is collected and caches are empty."""
        gc.collect()
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        return self.memory()

    def memory(self) -> dict[str, int]:
        """Bytes allocated and reserved by torch's allocator, bytes of the GPU and of the host in use, open files, threads."""
        figures = {
            "rss": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            "fds": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
        }
        if self.cuda:
            figures |= {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
            free, total = torch.cuda.mem_get_info()
            if not shares_gpu():  # else it is not this rank's alone
                figures["gpu"] = total - free
        return figures

    def agree(self, good: bool) -> bool:
        """Collective: whether it is good on every rank."""
        import torch.distributed as dist

        verdicts: list[Any] = [None] * self.size
        dist.all_gather_object(verdicts, bool(good))
        return all(verdicts)

    # ---- time limits ----------------------------------------------------------------------------------------------------
    @contextmanager
    def limit(self, name: str, seconds: float) -> Iterator[None]:
        """End the process, showing where it is, if the block takes longer, or longer than what is left of the budget."""
        seconds = max(min(seconds, self.ends - time.monotonic()), 0.1)
        over = threading.Event()

        def watch() -> None:
            if over.wait(seconds):
                return
            print(f"rank {self.rank}: {name} did not end within {seconds:.0f} s", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
            helper = threading.Thread(target=self._diagnose, daemon=True)
            helper.start()
            helper.join(5)
            over.wait(3)  # let the other ranks say theirs
            print(f"failed: {name} hung (rank {self.rank})", flush=True)
            os._exit(HUNG)

        faulthandler.dump_traceback_later(seconds + 12, exit=True)  # needs no GIL
        thread = threading.Thread(target=watch, daemon=True, name="time limit")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            faulthandler.cancel_dump_traceback_later()

    def _diagnose(self) -> None:
        for engine in self.engines:
            transport, executor = engine._transport, engine._runtime.executor if engine._runtime else None
            where = f"step {executor.global_step}, action {executor._cursor}" if executor else "setting up"
            told = transport.diagnose() if hasattr(transport, "diagnose") else "(this transport cannot tell)"
            print(f"rank {self.rank}, host at {where}: {told}", file=sys.stderr, flush=True)


def disturb(tools: Tools, chance: random.Random, loss: torch.Tensor) -> None:
    """Perhaps a kernel that takes milliseconds, a synchronize, a read, an empty cache; a sleep of the host."""
    if chance.random() < 0.3:
        if tools.cuda:
            torch.cuda._sleep(int(chance.random() * 5e6))
        else:
            time.sleep(chance.random() * 3e-3)
    if chance.random() < 0.1:
        tools.synchronize()
    if chance.random() < 0.1:
        loss.item()
    if chance.random() < 0.05 and tools.cuda:
        torch.cuda.empty_cache()
    if chance.random() < 0.05:
        time.sleep(chance.random() * 0.02)


def parser(text: str, budget: float) -> argparse.ArgumentParser:
    """With the arguments that all scripts know."""
    new = argparse.ArgumentParser(description=text)
    new.add_argument("--cpu", action="store_true", help="prove the script without GPUs")
    new.add_argument("--budget", type=float, default=budget, help="seconds for everything")
    new.add_argument("--transport", default="auto")
    new.add_argument("--timeout", type=float, default=30, help="cyclic.timeout_seconds")
    return new


def parsed(arguments: argparse.ArgumentParser, cases: dict[str, Any], seconds: float) -> argparse.Namespace:
    """The arguments; ``cases`` are the chosen ones by name, and ``limit`` the seconds for one, ``seconds`` if not said."""
    names = ", ".join(cases)
    arguments.add_argument("cases", nargs="*", default=[], metavar="CASE", help=f"of {names}; default: all")
    arguments.add_argument("--limit", type=float, default=seconds, help="seconds for one case")
    options = arguments.parse_args()
    unknown = set(options.cases) - set(cases)
    if unknown:
        sys.exit(f"no such case: {', '.join(sorted(unknown))}; there are {names}")
    options.cases = {name: cases[name] for name in options.cases or cases}
    return options


def run_cases(tools: Tools, cases: dict[str, Callable[[Tools], tuple[bool, dict[str, Any]]]], seconds: float) -> bool:
    """Each case on all ranks; a line for each.

    A case that raises ends the process, since its peers are in another place. All ranks have seconds to show their errors.
    """
    good = True
    for name, case in cases.items():
        begun = time.monotonic()
        with tools.limit(name, seconds):
            try:
                fine, figures = case(tools)
                fine = tools.agree(fine)
            except Exception as error:
                print(f"rank {tools.rank}: {name}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
                print(f"BAD  {name} rank {tools.rank} raised {type(error).__name__}", flush=True)
                time.sleep(3)
                os._exit(1)
        tools.say(f"{'ok  ' if fine else 'BAD '} {name} {json.dumps(figures)} {time.monotonic() - begun:.1f} s")
        if not fine and tools.rank != 0:
            print(f"rank {tools.rank}: {name} {json.dumps(figures)}", file=sys.stderr, flush=True)
        good &= fine
    return good


def finish(tools: Tools, good: bool) -> None:
    """Say how it went, last, and end."""
    import torch.distributed as dist

    tools.say("passed" if good else "failed")
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(not good)
