"""``deepspeed-cdp doctor``: versions, registration, access between GPUs and a self-test on this machine; or a model's plan."""

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from deepspeed_cdp.cli import explain, models
from deepspeed_cdp.cli.output import UserError, columns, positive, show, whole

PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "safetensors", "matplotlib")
TOLERANCE = 1e-6  # of the largest weight, fp32


def add(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    models.add(parser, required=False)
    parser.add_argument("--config", metavar="FILE", help="with --model: ds_config.json")
    parser.add_argument("--no-self-test", action="store_true", help="look only; train nothing")
    parser.add_argument("--ranks", type=whole, help="of the self-test or the plan; default: all GPUs, or 2")
    parser.add_argument(
        "--seconds",
        type=positive,
        default=180,
        help="how long the self-test may take; default: 180 (about 10 are enough once DeepSpeed has compiled its CPU operator)",
    )
    parser.add_argument("--trace", metavar="FILE", help="record the self-test (see timeline --from)")


def run(args: argparse.Namespace) -> int:
    """Check, test and print, or explain a model's plan; exit code 1 if something does not work."""
    ranks = args.ranks or torch.cuda.device_count() or 2
    if args.model is not None:
        plan = explain.explain(args, ranks)
        show(plan, explain.text(plan), args.json)
        return 0
    result: dict[str, Any] = {
        "versions": versions(),
        "registration": registration(),
        "devices": devices(),
        "environment": environment(),
    }
    problems = list(result["environment"])
    if not result["registration"]["active"]:
        problems.append(
            'a "cyclic" block has no effect in scripts that do not import deepspeed_cdp: ' + result["registration"]["why"]
        )
    if result["versions"]["deepspeed"] is None:
        problems.append("deepspeed is not installed: pip install deepspeed")
    if args.no_self_test:
        result["self_test"] = None
    else:
        if torch.cuda.device_count() and ranks > torch.cuda.device_count():
            raise UserError(f"--ranks is {ranks}, but there are {torch.cuda.device_count()} GPUs; use at most as many")
        result["self_test"] = self_test(ranks, args.seconds, args.trace)
        if not result["self_test"]["passed"]:
            problems.append(f"the self-test failed: {result['self_test']['why']}")
    result["problems"] = problems
    show(result, text(result), args.json)
    return 1 if problems else 0


def versions() -> dict[str, str | None]:
    """Installed versions; None for a package that is not installed."""
    from deepspeed_cdp.version import __version__

    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    found = {"deepspeed_cdp": __version__, "python": platform.python_version(), **{p: version(p) for p in PACKAGES}}
    return {**found, "cuda": torch.version.cuda}


def registration() -> dict[str, Any]:
    """Whether a script that imports only deepspeed gets the engine, tried in a fresh interpreter."""
    code = "import deepspeed; print('RESULT', int(hasattr(deepspeed.initialize, '__deepspeed_cdp_stock__')))"
    env = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)
    words = next((line.split() for line in done.stdout.splitlines() if line.startswith("RESULT")), None)
    folders = dict.fromkeys([sysconfig.get_paths()["purelib"], *(p for p in sys.path if p.endswith("site-packages"))])
    files = [str(p) for folder in folders for p in Path(folder).glob("deepspeed_cdp_autoload.pth")]
    active = words is not None and words[1] == "1"
    if active:
        why = "the installed .pth file registers it when deepspeed is imported"
    elif os.environ.get("DEEPSPEED_CDP_AUTOLOAD") == "0":
        why = "DEEPSPEED_CDP_AUTOLOAD=0 switches it off; unset it, or import deepspeed_cdp in the script"
    elif words is None:
        why = f"import deepspeed fails ({(done.stderr.strip().splitlines() or ['no output'])[-1][:120]})"
    elif not files:
        why = "no deepspeed_cdp_autoload.pth in site-packages: pip install the package, or import deepspeed_cdp in the script"
    else:
        why = f"{files[0]} is there but did not take effect: is Python started with -S or -I, or is the package half removed?"
    return {"active": active, "why": why, "files": files}


def devices() -> dict[str, Any]:
    """GPUs, peer access between them, and the transport that ``auto`` chooses for all of them."""
    from deepspeed_cdp.transport.choose import choose, observe

    count = torch.cuda.device_count()
    if not count:
        return {"gpus": [], "peer_access": [], "transport": "gloo", "why": "the ranks compute on CPUs", "troubles": {}}
    facts = [observe(torch.device("cuda", i)) for i in range(count)]
    access = [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)]
    troubles = {"peer": facts[0].peer_trouble, "nccl": facts[0].nccl_trouble}
    try:
        transport, why = choose("auto", facts)
    except ValueError as error:
        transport, why = None, str(error)
    return {
        "gpus": [torch.cuda.get_device_name(i) for i in range(count)],
        "peer_access": access,
        "transport": transport,
        "why": why,
        "troubles": {k: v for k, v in troubles.items() if v},
    }


def environment() -> list[str]:
    """Warnings about environment variables."""
    found = []
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        found.append("CUDA_DEVICE_MAX_CONNECTIONS=1 makes hand-offs wait for the passes: unset it")
    return found


def self_test(ranks: int, seconds: float, trace: str | None = None) -> dict[str, Any]:
    """Train a tiny model on local ranks and compare every weight with the single-process oracle."""
    kind = "cuda" if torch.cuda.device_count() else "cpu"
    began = time.monotonic()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the ranks' store, on a free port
    with tempfile.TemporaryDirectory() as folder:
        result = os.path.join(folder, "result.json")
        command = [sys.executable, "-m", f"{__package__}.selftest", kind, result, *([os.path.abspath(trace)] if trace else [])]
        root = str(Path(__file__).parents[2])
        base = {
            **os.environ,
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "DS_ACCELERATOR": kind,
            "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        }
        base.setdefault("OMP_NUM_THREADS", "1")
        logs = [open(os.path.join(folder, f"{r}.log"), "w+") for r in range(ranks)]  # noqa: SIM115
        started = [
            subprocess.Popen(command, env={**base, "RANK": str(r), "LOCAL_RANK": str(r)}, stdout=logs[r], stderr=logs[r])
            for r in range(ranks)
        ]
        why = _wait(started, began + seconds)
        if why:
            failed = next((r for r, p in enumerate(started) if p.returncode not in (0, -9)), 0)
            logs[failed].seek(0)
            said = [line for line in logs[failed].read().splitlines() if line.strip()]
            why += f"; rank {failed} said: {said[-1][:300]}" if said else ""
        for log in logs:
            log.close()
        found = json.loads(Path(result).read_text()) if not why and os.path.exists(result) else {}
    passed = False
    if found:
        passed = found["difference"] <= TOLERANCE * max(found["largest"], 1.0) and not found["collectives"]
        why = "" if passed else f"weights differ by {found['difference']:.3g}, {found['collectives']} collectives in a step"
    return {
        "passed": passed,
        "why": why or "" if passed else why or "no result was written",
        "device": kind,
        "ranks": ranks,
        "seconds": time.monotonic() - began,
        **found,
    }


def _wait(started: list[subprocess.Popen], until: float) -> str:
    """Wait for all processes; kill them when the time is over, or ten seconds after one fails. Returns the problem, or ""."""
    why = ""
    while any(p.poll() is None for p in started):
        failed = [r for r, p in enumerate(started) if p.poll() not in (None, 0)]
        if failed and not why:
            why = f"rank {failed[0]} ended with exit code {started[failed[0]].returncode}"
            until = min(until, time.monotonic() + 10)
        if time.monotonic() > until:
            why = why or "it took too long (--seconds)"
            for p in started:
                p.kill()
        time.sleep(0.05)
    failed = [r for r, p in enumerate(started) if p.returncode]
    return why or (f"rank {failed[0]} ended with exit code {started[failed[0]].returncode}" if failed else "")


def text(r: dict[str, Any]) -> str:
    """The result as text."""
    d, t = r["devices"], r["self_test"]
    lines = [
        "versions      " + ", ".join(f"{k} {v}" for k, v in r["versions"].items() if v),
        f"registration  {'active' if r['registration']['active'] else 'not active'}: {r['registration']['why']}",
    ]
    if d["gpus"]:
        lines.append("GPUs          " + ", ".join(f"{i}: {name}" for i, name in enumerate(d["gpus"])))
        rows = [("peer access", *range(len(d["gpus"])))]
        rows += [(i, *("yes" if x else "no" for x in row)) for i, row in enumerate(d["peer_access"])]
        lines += ["  " + line for line in columns(rows)]
    lines.append(f"transport     {d['transport'] or 'none works'}: {d['why']}")
    lines += [f"  {name} does not work: {why}" for name, why in d["troubles"].items()]
    if t is None:
        lines.append("self-test     not run")
    else:
        what = f"{t['ranks']} ranks on {t['device']}, {t['seconds']:.0f} s"
        if t["passed"]:
            lines.append(
                f"self-test     passed: {what}, over {t['transport']}: {t['steps']} steps equal the oracle's to "
                f"{t['difference']:.1g}, no collective in a step"
            )
        else:
            lines.append(f"self-test     FAILED: {what}: {t['why']}")
    lines += [f"problem: {p}" for p in r["problems"]]
    return "\n".join(lines)
