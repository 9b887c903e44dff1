"""Host time of a step over the peer transport, without a GPU: ``python -m benchmarks.host_time``.

One rank of a ring trains a tiny model of Llama's shape; the driver is a stub (stub_cuda.py). Printed are microseconds of CPU
time a step, the lowest of all steps:

- of forward, backward and step, beside those of the model alone, by turns. The owner's kernels are left out: they are a GPU's.
- by part of the code. Measuring costs some of the time that it shows.

``--native`` is what GPUs have: messages and autograd's side of passes in C++. ``--cold`` writes to other memory at every layer,
as a model does.
"""

import argparse
import collections
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.stub_cuda import Stub, build, stubbed
from deepspeed_cdp.model.make_plan import Settings
from deepspeed_cdp.native import load
from deepspeed_cdp.optim.stage_owner import StageOwner
from deepspeed_cdp.plan.delay_correction import DelayCorrection
from deepspeed_cdp.runtime import grad_accumulation
from deepspeed_cdp.runtime.executor import Executor
from deepspeed_cdp.runtime.grad_accumulation import GradAccumulation
from deepspeed_cdp.runtime.messages import Messages, PendingReads
from deepspeed_cdp.runtime.owner_executor import OwnerExecutor
from deepspeed_cdp.runtime.param_hooks import ParamHooks
from deepspeed_cdp.runtime.residency import Partitioned
from deepspeed_cdp.runtime.runtime import Runtime
from deepspeed_cdp.runtime.step_counters import StepCounters
from deepspeed_cdp.runtime.step_metrics import StepMetrics
from deepspeed_cdp.transport.cuda_bindings import CudaBindings
from deepspeed_cdp.transport.cuda_common import EventTicket, StreamTicket, Watchdog
from deepspeed_cdp.transport.peer import PeerTransport
from deepspeed_cdp.transport.peer_native import NativePeerTransport

SETTLE = 6  # steps that are left out at first
COMPUTE = ("owner", "add gradients")  # kernels on GPUs, whose time here says nothing
ACTIONS = "predict predict_after reduce reduce_after_waits norm step wait_published own_added read_ended".split()
PARTS: dict[str, list[tuple[type, tuple[str, ...]]]] = {
    "owner": [(StageOwner, ("advance", "average", "update", "predict", "finish", "record", "checksum"))],
    "add gradients": [(GradAccumulation, ("add",))],
    "runtime": [(Runtime, ("step", "end_backward", "check_loss"))],
    "hooks": [
        (
            ParamHooks,
            (
                "_enter_forward",
                "_enter_backward",
                "_hook_outputs",
                "end_backward",
                "_on_output_grad",
                "_begin_forward",
                "prepare_backward_read",
            ),
        )
    ],
    "saved tensors": [(ParamHooks, ("_pack", "_unpack", "_begin_saving", "_end_saving"))],
    "fused layers": [(grad_accumulation._Layer, ("forward", "add")), (GradAccumulation, ("add_product",))],
    "bind": [(ParamHooks, ("bind", "unbind"))],
    "executor": [(Executor, ("_execute", "end_step", "acquire", "release"))],
    "owner's actions": [(OwnerExecutor, tuple(ACTIONS))],
    "residency": [(Partitioned, ("wait", "release"))],
    "messages": [
        (Messages, ("post", "post_all", "offer", "push", "wait", "back", "coming_back", "wait_readers", "place")),
        (PendingReads, ("add", "take")),
    ],
    "metrics": [(StepMetrics, ("receive", "add", "compare", "read")), (StepCounters, ("end_step",))],
    "transport": [
        (PeerTransport, ("post", "push", "record_event", "wait_event", "relay", "wait_on_current_stream")),
        (StreamTicket, ("wait",)),
        (EventTicket, ("__init__", "__del__")),
    ],
    "watchdog": [(Watchdog, ("expect", "expect_stream"))],
    "driver": [(CudaBindings, ("wait_value", "write_value", "copy", "record_event", "wait_event", "event_done"))],
}


class Clock:
    """Seconds by part, each without the parts inside it."""

    def __init__(self) -> None:
        self.seconds: collections.Counter[str] = collections.Counter()
        self.calls: collections.Counter[str] = collections.Counter()
        self._inside: list[float] = []  # by open call: seconds in the calls inside

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(0.0)
            begun = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.thread_time() - begun
                self.seconds[name] += took - self._inside.pop()
                self.calls[name] += 1
                if self._inside:
                    self._inside[-1] += took

        return timed

    def put(self, parts: dict[str, list[tuple[type, tuple[str, ...]]]]) -> None:
        """Time these methods from now on."""
        for name, methods in parts.items():
            for owner, names in methods:
                for method in names:
                    if method in vars(owner):
                        setattr(owner, method, self.around(name, vars(owner)[method]))


class Layer(nn.Module):
    """As many parameters as a layer of Llama has, and next to no work."""

    def __init__(self, width: int, cold: torch.Tensor | None):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(7))
        self.scales = nn.ParameterList(torch.ones(width) for _ in range(2))
        self.cold = [cold]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (cold,) = self.cold
        if cold is not None:
            cold.add_(1)
            x = _Cold.apply(x, cold)
        for scale in self.scales:
            x = x * scale
        for linear in self.linears:
            x = torch.tanh(linear(x))
        return x


class _Cold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cold: torch.Tensor) -> torch.Tensor:
        ctx.cold = cold
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.cold.add_(1)
        return grad, None


def model(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    if args.llama:
        from transformers import LlamaConfig, LlamaForCausalLM

        shape = {"hidden_size": args.width, "intermediate_size": 2 * args.width, "num_hidden_layers": args.layers}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=32, use_cache=False, tie_word_embeddings=False, **shape, **heads))
    cold = torch.zeros(args.cold << 18) if args.cold else None
    layers = (Layer(args.width, cold) for _ in range(args.layers))
    return nn.Sequential(nn.Embedding(32, args.width), *layers, nn.Linear(args.width, 32))


def loss_of(module: nn.Module) -> torch.Tensor:
    batch = torch.zeros(1, 4, dtype=torch.int64)
    return module(batch).square().mean() if isinstance(module, nn.Sequential) else module(input_ids=batch, labels=batch).loss


def made(args: argparse.Namespace, rank: int) -> tuple[nn.Module, Runtime]:
    """A rank's module and runtime."""
    module = model(args)
    cpu = torch.device("cpu", 0)
    where = rank, args.ranks, 100.0, cpu
    transport = NativePeerTransport(load.load(), *where) if args.native else PeerTransport(*where)
    settings = Settings(
        args.rule,
        partition_method="parameters",
        units=None if args.llama else [str(i) for i in range(args.layers + 2)],
        gradient_accumulation_fusion=True,
        delay_correction=DelayCorrection(args.correction),
        any_order=False,
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    return module, Runtime(module, optimizer, settings, transport, cpu)


def step(module: nn.Module, runtime: Runtime) -> list[float]:
    """Returns the seconds of forward, backward and step."""
    times = [time.thread_time()]
    with runtime.forward():
        loss = loss_of(module)
    times.append(time.thread_time())
    loss.backward()
    runtime.end_backward()
    times.append(time.thread_time())
    runtime.step()
    times.append(time.thread_time())
    return [b - a for a, b in zip(times, times[1:])]


def step_alone(module: nn.Module) -> list[float]:
    """The same of the model without an engine."""
    times = [time.thread_time()]
    loss = loss_of(module)
    times.append(time.thread_time())
    loss.backward()
    times.append(time.thread_time())
    module.zero_grad(set_to_none=True)
    times.append(time.thread_time())
    return [b - a for a, b in zip(times, times[1:])]


def compare(args: argparse.Namespace) -> None:
    """Print the time of the parts of a step, beside the model's alone."""
    squares, seen = torch.zeros(1), collections.defaultdict(list)
    nothing = {name: lambda *_: None for name in ("predict", "update")} | {n: lambda *_: squares for n in ("advance", "average")}
    with mock.patch.multiple(StageOwner, **nothing):
        alone = model(args)
        module, runtime = made(args, args.rank)
        for _ in range(SETTLE + args.steps):
            seen["alone"].append(step_alone(alone))
            seen["engine"].append(step(module, runtime))
        runtime.close(False)
    lowest = {name: [1e6 * min(part) for part in zip(*times[SETTLE:])] for name, times in seen.items()}
    lowest["difference"] = [a - b for a, b in zip(lowest["engine"], lowest["alone"])]
    for name, (forward, backward, end) in lowest.items():
        print(f"  {name:16s} forward {forward:8.0f} us, backward {backward:8.0f} us, step {end:8.0f} us")


def run(args: argparse.Namespace, stub: Stub) -> None:
    compare(args)
    clock, seen = Clock(), collections.defaultdict(list)
    clock.put({k: v for k, v in PARTS.items() if not args.coarse or k in ("runtime", "hooks", *COMPUTE)})
    module, runtime = made(args, args.rank)
    calls = []
    for _ in range(SETTLE + args.steps):
        before = stub.total()
        clock.seconds.clear()
        clock.calls.clear()
        step(module, runtime)
        calls.append(stub.total() - before)
        for name in PARTS:
            seen[name].append((clock.seconds[name], clock.calls[name]))
    actions = len(runtime.executor._steady.actions)
    whole = 0.0
    for name, values in seen.items():
        micro = 1e6 * min(s for s, _ in values[SETTLE:])
        whole += 0 if name in COMPUTE else micro
        if micro:
            print(f"  {name:16s} {micro:8.0f} us in {statistics.median(n for _, n in values[SETTLE:]):5.0f} calls")
    without, driver = " and ".join(COMPUTE), statistics.median(calls)
    print(f"rank {args.rank}: {whole:.0f} us a step without {without}; {actions} actions, {driver:.0f} driver calls")
    runtime.close(False)


def main() -> None:
    new = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    new.add_argument("--layers", type=int, default=24)
    new.add_argument("--width", type=int, default=16)
    new.add_argument("--ranks", type=int, default=2)
    new.add_argument("--rank", type=int, default=0)
    new.add_argument("--rule", default="cdp-v2")
    new.add_argument("--correction", default="predict")
    new.add_argument("--cold", type=int, default=0, help="MiB that every layer writes")
    new.add_argument("--steps", type=int, default=20)
    new.add_argument("--llama", action="store_true", help="Hugging Face's Llama instead of layers that do next to nothing")
    new.add_argument("--native", action="store_true", help="C++, as on GPUs")
    new.add_argument("--coarse", action="store_true", help="few parts, so that measuring costs less")
    args = new.parse_args()
    os.environ[load.OFF] = "1" if args.native else "0"
    with tempfile.TemporaryDirectory() as folder, stubbed(build(Path(folder))) as stub:
        run(args, stub)


if __name__ == "__main__":
    main()
