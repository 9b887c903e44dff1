"""What happens to the others when a rank is killed, stopped, or raises: they end in time and say where they were and for whom.

Not under torchrun, which would end the others itself: this starts the ranks, watches them, and says passed or failed last.

    python tests/gpu/rank_failures.py [--ranks 2] [CASE ...]
"""

import argparse
import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from support.rank_tools import Tools, models, parser  # noqa: E402

HERE = Path(__file__).resolve()
MARGIN = 15.0  # seconds, after cyclic.timeout_seconds, until every survivor has ended
BEGIN = 12  # the step after which the guilty rank misbehaves
BRIEF_STEPS = 80
NAMED = re.compile(r"HandoffError: rank (?P<rank>\d+), step \d+, .*(stage \d+|flush|gather|saving).*stream \w+.*rank \d+")


# ---- a rank -------------------------------------------------------------------------------------------------------------
def train(options: argparse.Namespace) -> None:
    """Train, a line of output per step; ``--reads`` says what the host blocks in."""
    import torch

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    faulthandler.dump_traceback_later(options.budget, exit=True)
    tools = Tools(options)
    module = models.build("llama")
    engine = tools.engine(module, options.rule)
    batches = tools.batches("llama", options.steps)

    def refuse(*_) -> None:
        raise FloatingPointError("a forward that fails")

    for step in range(options.steps):
        if options.raises_at == step:
            module.model.layers[1].register_forward_pre_hook(refuse)
        loss = models.loss(engine, "llama", batches[step, 0])
        if options.reads == "item":
            print(f"loss {step} {loss.item()!r}", flush=True)
        engine.backward(loss)
        engine.step()
        if options.reads == "synchronize":
            tools.synchronize()
        if options.reads == "empty" and tools.cuda:
            torch.cuda.empty_cache()
        if options.reads != "item":
            print(f"loss {step} ?", flush=True)
    state = engine.module_state_dict()
    digest = {k: v.double().sum().item() for k, v in state.items()}
    print("state", json.dumps(digest), flush=True)
    tools.destroy(engine)


# ---- the launcher -------------------------------------------------------------------------------------------------------
class Rank:
    """A child process, its output as it comes, its errors in a file."""

    def __init__(self, rank: int, options: argparse.Namespace, folder: str, port: int, arguments: list[str]):
        self.rank, self.steps, self.losses, self.state = rank, 0, {}, ""
        self.errors = open(os.path.join(folder, f"rank{rank}.log"), "w+")  # noqa: SIM115, closed by close
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(options.ranks),
            "LOCAL_WORLD_SIZE": str(options.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        }
        command = [
            sys.executable,
            str(HERE),
            "--is-rank",
            "--transport",
            options.transport,
            "--timeout",
            str(options.timeout),
            "--rule",
            options.rule,
            "--reads",
            options.reads,
            "--budget",
            str(options.budget),
            *(["--cpu"] if options.cpu else []),
            *arguments,
        ]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self.errors, text=True, env=environment, start_new_session=True
        )
        self.ended: float | None = None
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            words = line.split(maxsplit=2)
            if line.startswith("loss "):
                self.losses[int(words[1])] = words[2].strip()
                self.steps = int(words[1]) + 1
            if line.startswith("state "):
                self.state = line

    def poll(self) -> int | None:
        code = self.process.poll()
        if code is not None and self.ended is None:
            self.ended = time.monotonic()
        return code

    def text(self) -> str:
        self.errors.flush()
        return Path(self.errors.name).read_text(errors="replace")

    def close(self) -> bool:
        """End it and what it started; whether something of it was still there after its own end."""
        left = False
        try:
            os.killpg(self.process.pid, signal.SIGKILL if self.poll() is None else 0)
            left = self.poll() is not None
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        self.reader.join(5)
        self.errors.close()
        return left


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


class Case:
    """One run of all ranks, of which ``who`` misbehaves; what was wrong is in ``wrong``."""

    def __init__(self, name: str, options: argparse.Namespace, calm: list["Rank"] | None):
        self.name, self.options, self.calm, self.wrong, self.figures = name, options, calm, [], {}

    def run(
        self, steps: int, act: Callable[[Rank], None] | None = None, who: int = 1, raises: bool = False, survive: bool = True
    ) -> list[Rank]:
        """Args: act: done to rank ``who`` once it has begun; survive: whether all ranks are to end well."""
        options, port = self.options, _free_port()
        with tempfile.TemporaryDirectory() as folder:
            ranks = [
                Rank(
                    r,
                    options,
                    folder,
                    port,
                    ["--steps", str(steps), *(["--raises-at", str(BEGIN)] if raises and r == who else [])],
                )
                for r in range(options.ranks)
            ]
            try:
                self._watch(ranks, act, who, raises, survive)
            finally:
                for rank in ranks:
                    if rank.close():
                        self.wrong.append(f"rank {rank.rank} left processes behind")
        return ranks

    def _watch(self, ranks: list[Rank], act, who: int, raises: bool, survive: bool) -> None:
        options, guilty = self.options, ranks[who]
        if not wait_until(lambda: guilty.steps >= BEGIN or guilty.poll() is not None, options.start):
            self._show(ranks, f"rank {who} has done {guilty.steps} steps after {options.start} s")
            return
        begun = time.monotonic()
        if act is not None:
            if guilty.poll() is not None:
                self._show(ranks, f"rank {who} ended before its time")
                return
            act(guilty)
        if raises:
            wait_until(lambda: guilty.poll() is not None, options.timeout + MARGIN)
        rest = [r for r in ranks if survive or r is not guilty]
        allowed = 120 if survive else options.timeout + MARGIN
        if not wait_until(lambda: all(r.poll() is not None for r in rest), allowed):
            for r in rest:
                if r.poll() is None:
                    os.kill(r.process.pid, signal.SIGUSR1)  # its stacks go to its log
            time.sleep(1)
            self._show(ranks, f"ranks {[r.rank for r in rest if r.poll() is None]} go on after {allowed:.0f} s")
            return
        self.figures["seconds"] = {r.rank: round(r.ended - begun, 1) for r in rest}
        before = len(self.wrong)
        if survive:
            self.wrong += [f"rank {r.rank} exited with {r.poll()}" for r in ranks if r.poll()]
        else:
            for r in rest:
                self._judge(r)
        if raises and "a forward that fails" not in guilty.text():
            self.wrong.append("the guilty rank does not say what it raised")
        if len(self.wrong) > before:
            self._show(ranks, "")

    def _judge(self, rank: Rank) -> None:
        """A survivor failed, in words, and had no wrong numbers before."""
        lines = [x for x in rank.text().splitlines() if "HandoffError: " in x]
        said = NAMED.search(lines[-1]) if lines else None
        self.figures[f"rank {rank.rank} says"] = lines[-1].split("HandoffError: ")[-1] if lines else "nothing"
        if rank.poll() == 0:
            self.wrong.append(f"rank {rank.rank} ended as if nothing had happened")
        if said is None or int(said["rank"]) != rank.rank:
            self.wrong.append(f"rank {rank.rank} does not name its rank, step, stage, stream and peer")
        known = self.calm[rank.rank].losses if self.calm else {}
        odd = {k: (v, known[k]) for k, v in rank.losses.items() if k in known and v != known[k] and v != "nan"}
        if odd:
            self.wrong.append(f"rank {rank.rank} got wrong losses before its error: {odd}")

    def _show(self, ranks: list[Rank], what: str) -> None:
        if what:
            self.wrong.append(what)
        for r in ranks:
            print(
                f"---- {self.name}, rank {r.rank}, exit code {r.poll()}, {r.steps} steps\n{r.text()[-5000:]}",
                file=sys.stderr,
                flush=True,
            )


def _free_port() -> int:
    from support.processes import free_port

    return free_port()


def cases(options: argparse.Namespace) -> dict[str, Callable[[Case], None]]:
    last = options.ranks - 1

    def stop(rank: Rank, seconds: float) -> None:
        os.kill(rank.process.pid, signal.SIGSTOP)
        timer = threading.Timer(seconds, lambda: rank.poll() is None and os.kill(rank.process.pid, signal.SIGCONT))
        timer.daemon = True
        timer.start()

    def equal(case: Case, ranks: list[Rank]) -> None:
        for mine, calm in zip(ranks, case.calm or []):
            if not mine.state or mine.state != calm.state:
                case.wrong.append(f"rank {mine.rank} ends with other weights than undisturbed")
            if mine.losses != calm.losses:
                case.wrong.append(f"rank {mine.rank} has other losses than undisturbed")

    long, brief = options.timeout + 6, options.timeout * 0.6
    return {
        "killed": lambda c: c.run(10**4, lambda r: r.process.send_signal(signal.SIGKILL), last, survive=False),
        "killed_first": lambda c: c.run(10**4, lambda r: r.process.send_signal(signal.SIGKILL), 0, survive=False),
        "stopped": lambda c: c.run(10**4, lambda r: stop(r, long), last, survive=False),
        "raises": lambda c: c.run(10**4, None, last, raises=True, survive=False),
        "paused": lambda c: equal(c, c.run(BRIEF_STEPS, lambda r: stop(r, brief), last)),
        "paused_first": lambda c: equal(c, c.run(BRIEF_STEPS, lambda r: stop(r, brief), 0)),
    }


def main() -> None:
    arguments = parser(__doc__, 900)
    arguments.add_argument("cases", nargs="*", metavar="CASE")
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--start", type=float, default=90, help="seconds until the first steps")
    arguments.add_argument("--rule", default="cdp-v2")
    arguments.add_argument("--reads", default="item", choices=("item", "synchronize", "empty", "none"), help="per step")
    arguments.add_argument("--steps", type=int, default=BRIEF_STEPS)
    arguments.add_argument("--raises-at", type=int, default=-1)
    arguments.add_argument("--is-rank", action="store_true", help=argparse.SUPPRESS)
    arguments.set_defaults(timeout=8.0)
    options = arguments.parse_args()
    if options.is_rank:
        train(options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # so that the ranks are, too
    known, ends = cases(options), time.monotonic() + options.budget
    chosen, good = options.cases or list(known), True
    if set(chosen) - set(known):
        sys.exit(f"no such case: {set(chosen) - set(known)}; there are {', '.join(known)}")
    calm = Case("undisturbed", options, None)
    baseline = calm.run(BRIEF_STEPS)
    for name in ["undisturbed", *chosen]:
        begun, case = time.monotonic(), calm if name == "undisturbed" else Case(name, options, baseline)
        if name != "undisturbed":
            if time.monotonic() > ends - options.timeout - MARGIN - 20 or calm.wrong:
                case.wrong.append("no time is left" if not calm.wrong else "the undisturbed run failed")
            else:
                known[name](case)
        good &= not case.wrong
        print(
            f"{'BAD ' if case.wrong else 'ok  '} {name}, {options.ranks} ranks, host reads by {options.reads}: "
            f"{json.dumps(case.figures)} {'; '.join(case.wrong)} {time.monotonic() - begun:.1f} s",
            flush=True,
        )
    print("passed" if good else "failed", flush=True)
    sys.exit(not good)


if __name__ == "__main__":
    main()
