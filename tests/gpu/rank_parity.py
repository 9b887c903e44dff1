"""One rank of the GPU parity check: CyclicEngine through deepspeed.initialize against the oracle on the same GPU.

Started by tests/gpu/test_gpu.py, or by hand: torchrun --nproc-per-node N tests/gpu/rank_parity.py [SECONDS] [--transport T]
With --cpu it runs without GPUs, to prove the script; with --replicas only the cases in which every rank keeps all parameters;
with --rules 1,2 others than the three that have names.
"""

import argparse
import faulthandler
import itertools
import json
import os
import sys
import time
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
parser = argparse.ArgumentParser()
parser.add_argument("seconds", nargs="?", type=float, default=240)
parser.add_argument("--transport", choices=("auto", "peer", "nccl", "gloo"), default="auto")
parser.add_argument("--cpu", action="store_true")
parser.add_argument("--replicas", action="store_true")
parser.add_argument("--rules", default="", help="only these, comma-separated, names or K, with one and two rounds")
ARGS = parser.parse_args()
if ARGS.cpu:
    os.environ["DS_ACCELERATOR"] = "cpu"
    torch.set_num_threads(1)
faulthandler.dump_traceback_later(ARGS.seconds, exit=True)
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import deepspeed  # noqa: E402

import deepspeed_cdp  # noqa: E402, F401
from deepspeed_cdp.analysis import reference  # noqa: E402
from deepspeed_cdp.plan.schedule import threshold  # noqa: E402
from support import models  # noqa: E402
from support.engine_work import explicit  # noqa: E402
from support.gpu_places import take_gpu  # noqa: E402

STEPS = 7


def adamw(named):
    return torch.optim.AdamW([p for _, p in named], lr=1e-2, foreach=True)


def sgd(named):
    return torch.optim.SGD([p for _, p in named], lr=0.05, momentum=0.9, foreach=True)


def check(
    kind: str,
    rule: str,
    rounds: int,
    bf16: bool,
    rank: int,
    size: int,
    synchronize: bool,
    offload: bool = False,
    stage: int = 3,
    fusion: bool | str = "auto",
    fp32_sums: bool = False,
) -> dict:
    device = torch.device("cpu") if ARGS.cpu else torch.device("cuda", torch.cuda.current_device())
    dtype = torch.bfloat16 if bf16 else torch.float32
    module = models.build(kind).to(device, dtype)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": rounds,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "cyclic": {
            "enabled": True,
            "rule": rule,
            "transport": ARGS.transport,
            "timeout_seconds": 30,
            "gradient_accumulation_fusion": fusion,
        },
    }
    if fp32_sums:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if offload:
        zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
        config |= {"zero_force_ds_cpu_optimizer": False, "zero_optimization": zero}
    make = sgd if fp32_sums else adamw  # Adam makes a step of a gradient that is nothing but how the sum was rounded
    engine, *_ = deepspeed.initialize(model=module, optimizer=make(list(module.named_parameters())), config=config)
    losses = {}
    for step in range(STEPS):
        for m in range(rounds):
            x = models.batch(kind, step, m, rank).to(device)
            loss = models.loss(engine, kind, x.to(dtype) if x.is_floating_point() else x)
            engine.backward(loss)
            engine.step()
            losses[step, m, rank] = loss.detach()
            if synchronize and not ARGS.cpu:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
        if step == 3:
            engine.flush()
    state = engine.module_state_dict()
    assert {m.device.type for m in engine._runtime.owner.masters.values()} <= {"cpu" if offload else device.type}
    assert engine.cyclic_plan.replicated == (stage < 3)
    assert stage == 3 or all(torch.equal(p, state[n]) for n, p in engine.module.named_parameters()), "all replicas are the newest"
    stages, traffic, transport = engine.cyclic_plan.stages, engine._runtime.counters.traffic(), engine._transport
    fused = engine._runtime.fused
    assert bool(fused) == (fusion is True or fusion == "auto" and not ARGS.cpu), fused
    assert ARGS.transport in ("auto", transport.name), transport.name
    engine.destroy()
    template = models.build(kind).to(device, dtype)
    want = reference.train(
        template,
        stages,
        threshold(rule, size),
        lambda t, m, r: (lambda x: x.to(dtype) if x.is_floating_point() else x)(models.batch(kind, t, m, r).to(device)),
        lambda call, x: models.loss(call, kind, x),
        make,
        STEPS,
        rounds=rounds,
        clip=0.5,
        flush_after={3},
        grad_dtype=torch.float32 if fp32_sums else None,
        delay_correction=explicit("none" if make is sgd else "predict"),  # as cyclic.delay_correction "auto"
    )
    worst = max(float((state[n].float() - p.to(dtype).float()).abs().max()) for n, p in want.masters.items())
    scale = max(float(p.abs().max()) for p in want.masters.values())
    mine = max(abs(float(v) - want.losses[k]) / abs(want.losses[k]) for k, v in losses.items())
    bytes_right = all(row["counted"] == row["closed form"] for row in traffic.values())
    return {
        "model": kind,
        "rule": rule,
        "rounds": rounds,
        "bf16": bf16,
        "ranks": size,
        "weights": worst / scale,
        "losses": mine,
        "bytes": bytes_right,
        "sync": synchronize,
        "offload": offload,
        "stage": stage,
        "transport": transport.name,
        "fused": fused,
        "fp32 sums": fp32_sums,
    }


def main() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    deepspeed.init_distributed("gloo" if ARGS.cpu else take_gpu()[1])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cases = [
        (k, r, m, False, s) for k, r, m, s in itertools.product(("mlp", "llama-tied"), ("cdp-v2", "cdp-v1", "dp"), (1,), (False,))
    ]
    cases += [
        ("llama", "cdp-v2", 2, False, True),
        ("llama-tied", "cdp-v1", 1, True, False),
        ("llama", "cdp-v2", 1, True, True),
        ("routed", "cdp-v2", 1, False, False),
    ]
    cases += [
        ("llama-tied", "cdp-v2", 2, False, False, True),
        ("llama", "cdp-v1", 1, False, True, True),
        ("llama-tied", "cdp-v2", 1, True, False, True),
        ("llama", "dp", 1, True, False, True),
    ]  # optimizer in host memory
    # gradients added after the products that make them; and inside these to sums of another dtype
    cases += [("llama", "cdp-v2", 1, False, False, False, 3, False), ("llama-tied", "cdp-v1", 2, True, False, False, 3, False)]
    cases += [("llama", rule, 2, True, False, False, 3, "auto", True) for rule in ("cdp-v2", "cdp-v1")]
    cases = [] if ARGS.replicas else cases
    # every rank keeps all parameters; under v1 owners publish apart, under v2 and dp in place
    cases += [(k, r, 1, False, False, False, 1) for k, r in itertools.product(("mlp", "llama-tied"), ("cdp-v2", "cdp-v1", "dp"))]
    cases += [
        ("llama", "cdp-v2", 2, False, True, False, 2),
        ("llama-tied", "cdp-v1", 1, True, False, False, 0),
        ("llama", "cdp-v2", 1, True, True, False, 1),
        ("routed", "cdp-v2", 1, False, False, False, 1),
        ("llama-tied", "cdp-v1", 2, False, True, False, 1),
        ("llama-tied", "cdp-v2", 2, False, False, True, 1),
    ]
    if ARGS.rules:
        rules = [int(r) if r.isdigit() else r for r in ARGS.rules.split(",")]
        cases = [(kind, r, rounds, False, False) for kind, r, rounds in itertools.product(("mlp", "llama-tied"), rules, (1, 2))]
    failed = False
    for case in cases:
        begun = time.time()
        row = check(*case[:4], rank, size, *case[4:])
        # fp32: kernels of another shape may sum in another order; bf16: a weight may round to its neighbour (2^-7 of it)
        good = (
            row["weights"] < (2**-7 if row["bf16"] else 1e-6) and row["losses"] < (1e-3 if row["bf16"] else 1e-6) and row["bytes"]
        )
        failed |= not good
        if rank == 0:
            print(("ok  " if good else "BAD ") + json.dumps(row) + f" {time.time() - begun:.1f} s", flush=True)
    if rank == 0:
        print("failed" if failed else "passed", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
