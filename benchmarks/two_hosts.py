"""Two hosts with a slow link, emulated on one machine: ``python -m benchmarks.two_hosts --out FOLDER`` (needs root, ip, tc).

Two network namespaces with host names of their own are the hosts. A veth pair joins them, and ``tc ... tbf`` limits either
direction to ``--mbit``. torchrun starts ``--ranks`` on each host, with a common rendezvous; inside a host, ranks talk over
loopback. Engines take turns: each trains a small Llama (fp32), and rank 0 times steps. The network interface counts the bytes
on the link.

    rings   cdp-v2, cyclic.ring_size "auto": a ring per host, stages averaged over the link
    ring    cdp-v2, one ring through both hosts
    zero3   stock DeepSpeed ZeRO-3
"""

import argparse
import csv
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LINK = "slow0"  # the interface's name in both hosts
ADDRESS = "10.77.0.{}"
FIELDS = ("engine", "repeat", "hosts", "ranks", "mbit", "parameters_mb", "steps", "step_s", "sent_mb", "received_mb", "loss")


class Unable(Exception):
    """This machine cannot emulate two hosts; the message has the reason."""


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Unable(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")


@contextmanager
def two_hosts(mbit: float) -> Iterator[list[list[str]]]:
    """Create the hosts; gives the command prefix of each.

    Raises:
        Unable: no root, no ip or tc, or the kernel refuses.
    """
    names = [f"cyclic{os.getpid()}-{h}" for h in (0, 1)]
    if os.geteuid():
        raise Unable("network namespaces need root")
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", LINK, "netns", names[0], "type", "veth", "peer", "name", LINK, "netns", names[1])
        for h, name in enumerate(names):
            inside = ("ip", "netns", "exec", name)
            run(*inside, "ip", "link", "set", "lo", "up")
            run(*inside, "ip", "addr", "add", ADDRESS.format(h + 1) + "/24", "dev", LINK)
            run(*inside, "ip", "link", "set", LINK, "up")
            run(
                *inside,
                "tc",
                "qdisc",
                "add",
                "dev",
                LINK,
                "root",
                "tbf",
                "rate",
                f"{mbit:g}mbit",
                "burst",
                "64kb",
                "latency",
                "200ms",
            )
        yield [
            ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", f'hostname {name}; exec "$@"', "sh"] for name in names
        ]
    except FileNotFoundError as error:
        raise Unable(str(error)) from error
    finally:
        for name in names:
            subprocess.run(("ip", "netns", "del", name), capture_output=True)


def launch(hosts: list[list[str]], ranks: int, seconds: float, *arguments: str) -> str:
    """Run torchrun on both hosts; returns the output of rank 0.

    Raises:
        RuntimeError: a host's ranks failed, or did not end in time.
    """
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": LINK,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    processes = []
    for h, prefix in enumerate(hosts):
        command = [
            *prefix,
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            str(len(hosts)),
            "--nproc-per-node",
            str(ranks),
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"{ADDRESS.format(1)}:29577",
            "--rdzv-id",
            "two",
            "--local-addr",
            ADDRESS.format(h + 1),
            "--rdzv-conf",
            f"is_host={int(h == 0)}",
            "-m",
            "benchmarks.two_hosts",
            "--rank",
            *arguments,
        ]
        processes.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
            )
        )
    deadline, outputs = time.monotonic() + seconds, []
    try:
        for process in processes:
            outputs.append(process.communicate(timeout=max(deadline - time.monotonic(), 1))[0])
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                outputs.append(process.communicate(timeout=30)[0] + "\n(not done in time)")
    if any(process.returncode for process in processes):
        raise RuntimeError("\n".join(output[-8000:] for output in outputs))
    return outputs[0]


# ---- a rank -----------------------------------------------------------------------------------------------------------------
def crossed() -> tuple[int, int]:
    """Bytes that this host has received and sent over the link."""
    line = next(x for x in Path("/proc/self/net/dev").read_text().splitlines() if x.strip().startswith(LINK + ":"))
    numbers = line.split(":")[1].split()
    return int(numbers[0]), int(numbers[8])


def make(name: str, args: argparse.Namespace) -> Any:
    import deepspeed
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import deepspeed_cdp

    deepspeed_cdp.register()
    torch.manual_seed(0)
    module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=2048,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=args.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            use_cache=False,
        )
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "steps_per_print": None,
        "gradient_accumulation_steps": args.rounds,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    }
    if name != "zero3":
        config["cyclic"] = {"enabled": True, "timeout_seconds": 120, "ring_size": "auto" if name == "rings" else args.world}
    return deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)[0]


def rank(args: argparse.Namespace) -> None:
    """Train with the engines in turns, and write a row for each."""
    import deepspeed
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    deepspeed.utils.logger.setLevel("ERROR")
    args.world, me = dist.get_world_size(), dist.get_rank()
    for repeat in range(args.repeats):
        for name in args.engines.split(","):
            engine = make(name, args)
            if name == "rings":
                assert engine._transport.rings == 2, "each host must be a ring"
            parameters = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters()) * 4 / 1e6

            def train(steps: int, engine: Any = engine) -> float:
                for step in range(steps):
                    for m in range(args.rounds):
                        generator = torch.Generator().manual_seed(1000 * step + 10 * me + m)
                        x = torch.randint(0, 2048, (1, args.sequence), generator=generator)
                        loss = engine(input_ids=x, labels=x).loss
                        engine.backward(loss)
                        engine.step()
                return loss.item()

            train(args.warmup)
            before, begun = crossed(), time.perf_counter()
            loss = train(args.steps)
            seconds, after = (time.perf_counter() - begun) / args.steps, crossed()
            received, sent = ((b - a) / args.steps / 1e6 for a, b in zip(before, after))
            if name != "zero3":
                engine.flush()
            engine.destroy()
            dist.barrier()
            if me == 0:
                row = (
                    name,
                    repeat,
                    2,
                    args.world,
                    args.mbit,
                    f"{parameters:.2f}",
                    args.steps,
                    f"{seconds:.3f}",
                    f"{sent:.2f}",
                    f"{received:.2f}",
                    f"{loss:.4f}",
                )
                with open(args.rows, "a", newline="") as file:
                    csv.writer(file).writerow(row)
                print(*row, flush=True)
    dist.destroy_process_group()


# ---- the command ------------------------------------------------------------------------------------------------------------
def summary(rows: list[dict[str, str]]) -> str:
    """Medians by engine, and the ratio to ZeRO-3."""
    lines, by = [], {}
    for row in rows:
        by.setdefault(row["engine"], []).append(row)
    medians = {
        e: [statistics.median(float(r[k]) for r in found) for k in ("step_s", "sent_mb", "received_mb")]
        for e, found in by.items()
    }
    for engine, (seconds, sent, received) in medians.items():
        line = f"{engine:6} {seconds:7.3f} s a step, {sent:7.2f} MB sent and {received:7.2f} MB received over the link by host 0"
        if "zero3" in medians and engine != "zero3":
            line += f"; zero3 takes {medians['zero3'][0] / seconds:.2f} times as long"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rows", help=argparse.SUPPRESS)
    parser.add_argument("--out", help="folder for rows.csv and summary.txt")
    parser.add_argument("--engines", default="rings,zero3,ring")
    for name, default in (
        ("ranks", 2),
        ("layers", 4),
        ("sequence", 32),
        ("steps", 5),
        ("warmup", 2),
        ("repeats", 3),
        ("rounds", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mbit", type=float, default=100, help="of the link, either way")
    parser.add_argument("--seconds", type=float, default=900, help="for everything")
    args = parser.parse_args()
    if args.rank:
        return rank(args)
    with tempfile.TemporaryDirectory() as scratch, two_hosts(args.mbit) as hosts:
        rows = Path(scratch, "rows.csv")
        rows.write_text(",".join(FIELDS) + "\n")
        keys = "engines", "layers", "sequence", "steps", "warmup", "repeats", "rounds", "mbit"
        passed = [f"--{k}={getattr(args, k)}" for k in keys]
        print(launch(hosts, args.ranks, args.seconds, *passed, f"--rows={rows}"))
        text = summary(list(csv.DictReader(rows.open())))
        print(text)
        if args.out:
            Path(args.out).mkdir(parents=True, exist_ok=True)
            Path(args.out, "rows.csv").write_text(rows.read_text())
            Path(args.out, "summary.txt").write_text(
                f"python -m benchmarks.two_hosts {' '.join(passed)}\n{platform.platform()}, {os.cpu_count()} CPUs, load average "
                f"{os.getloadavg()[0]:.1f}\n\n{text}\n"
            )


if __name__ == "__main__":
    main()
