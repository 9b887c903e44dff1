"""Tasks of the learning experiments. A case is a dataset, an optimizer, ranks, a learning rate, a rule, a correction and a seed.

Cases of one seed and as many ranks start from the same weights and see the same micro-batches in the same order. So rules and
corrections are compared pair by pair. One process simulates all ranks (deepspeed_cdp/analysis/learning_simulator.py).
"""

import fcntl
import hashlib
import math
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from deepspeed_cdp.analysis.learning_simulator import Simulator, stages_of
from deepspeed_cdp.model.discover import Example
from examples.gpt import GPT, read_text, sample
from examples.images import digits
from examples.resnet import resnet

RULES = ("dp", "cdp-v1", "cdp-v2", "cdp-v2-warmup", "cdp-v1-warmup")
CORRECTIONS = ("none", "extrapolate", "predict", "auto")  # or predict:W, with a weight
_EAGER_STEPS = 4  # before a graph is captured, so that libraries have set themselves up


@dataclass(frozen=True)
class Size:
    """Length of the training on a dataset: micro-batch per rank, steps, steps between evaluations."""

    micro_batch: int
    steps: int
    every: int


BETA1 = {"gpt": 0.9, "gpt-beta1-0.5": 0.5, "gpt-beta1-0": 0.0}  # AdamW's momentum: what it does to stale gradients
SIZES = {
    "digits": {"full": Size(32, 440, 11), "small": Size(32, 440, 11), "tiny": Size(8, 12, 4)},
    **dict.fromkeys(BETA1, {"full": Size(8, 1000, 50), "small": Size(4, 800, 40), "tiny": Size(2, 12, 4)}),
    "gpt-31m": {"full": Size(4, 3000, 200), "tiny": Size(2, 12, 4)},
    "gpt-31m-tuned": {"full": Size(4, 1000, 100), "tiny": Size(2, 12, 4)},
    "gpt-128m": {"full": Size(4, 3000, 200), "tiny": Size(2, 12, 4)},
}
# Layers, width, heads, bytes per sequence, test windows
_TINY = (2, 32, 4, 32, 8)
GPTS = dict.fromkeys(BETA1, {"full": (4, 256, 4, 256, 64), "small": (6, 96, 4, 64, 128), "tiny": _TINY})
GPTS |= dict.fromkeys(("gpt-31m", "gpt-31m-tuned"), {"full": (10, 512, 8, 256, 256), "tiny": _TINY})
GPTS["gpt-128m"] = {"full": (18, 768, 12, 256, 256), "tiny": _TINY}
PRETRAINING = {"full": 2000, "tiny": 12}  # steps of 16 windows under dp, before fine-tuning
RATES = {"adamw": 1e-3, "nadamw": 1e-3, "muon": 3e-3, "sgd": 0.1}  # of the GPTs
TUNING = 0.1  # of these, in fine-tuning
OPTIMIZERS = {"digits": ("sgd",), **dict.fromkeys(GPTS, tuple(RATES))}  # the first is the dataset's own


@dataclass(frozen=True)
class Case:
    """``rate`` multiplies the optimizer's learning rate; ``cdp-v2-warmup`` makes the first tenth of the steps under dp."""

    dataset: str
    rate: float
    rule: str
    seed: int
    ranks: int = 4
    size: str = "full"
    optimizer: str = "adamw"
    correction: str = "none"

    @property
    def key(self) -> tuple[str, ...]:
        """As ``learning_report.key`` of its rows."""
        return self.dataset, self.optimizer, str(self.ranks), f"{self.rate:g}", self.rule, self.correction, str(self.seed)

    @property
    def delay_correction(self) -> str | dict[str, Any]:
        """As ``cyclic.delay_correction``."""
        method, *numbers = self.correction.split(":")
        return {"method": method, "weight": float(numbers[0])} if numbers else method

    @property
    def spans(self) -> Size:
        return SIZES[self.dataset][self.size]

    @property
    def warmup_steps(self) -> int:
        return self.spans.steps // 10 if self.rule.endswith("-warmup") else 0


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for hidden matrices, AdamW for the rest. Both take each group's own ``lr``."""

    def __init__(self, matrices: list[nn.Parameter], rest: list[nn.Parameter], lr: float):
        self._parts = (
            torch.optim.Muon(matrices, lr, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr, betas=(0.9, 0.95), weight_decay=0.1),
        )
        super().__init__(list(chain(*(part.param_groups for part in self._parts))), {})

    def step(self, closure: Any = None) -> None:
        for part in self._parts:
            part.step()


def optimizer_of(name: str, module: GPT, beta1: float) -> torch.optim.Optimizer:
    """Of a GPT. ``nadamw`` has a momentum that does not grow: its step is that of b1 m + (1 - b1) g."""
    every, betas, decay = list(module.parameters()), (beta1, 0.95), 0.1
    if name == "adamw":
        return torch.optim.AdamW(every, betas=betas, weight_decay=decay)
    if name == "nadamw":
        return torch.optim.NAdam(every, betas=betas, weight_decay=decay, decoupled_weight_decay=True, momentum_decay=1e6)
    if name == "sgd":
        return torch.optim.SGD(every, momentum=0.9)
    hidden = [p for p in module.blocks.parameters() if p.ndim == 2]
    return MuonAndAdamW(hidden, [p for p in every if all(p is not h for h in hidden)], RATES[name])


@dataclass
class Task:
    """A model, its optimizer and its data.

    Attributes:
        stages: parameter names, cut by FLOPs.
        batches: (step) -> one micro-batch per rank.
        loss: (module, batch) -> scalar.
        evaluate: () -> test loss, and accuracy or None.
        rate: (step) -> the learning rate.
        data: names the data, by its SHA-256.
    """

    module: nn.Module
    stages: list[list[str]]
    optimizer: torch.optim.Optimizer
    batches: Callable[[int], list[Any]]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    evaluate: Callable[[], tuple[float, float | None]]
    rate: Callable[[int], float]
    data: str


def _digits(case: Case, device: torch.device) -> Task:
    """A ResNet of 14 layers on 8 x 8 digits; SGD as in the paper's CIFAR-10 recipe, three drops by 5 at equal distances."""
    images = digits()
    data = hashlib.sha256(images.train[0].numpy().tobytes()).hexdigest()[:12]
    images = images.to(device)
    module = resnet("resnet14", "digits")
    stages = stages_of(module, case.ranks, Example((module.example_input_array,)))
    module.to(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    spans, each = case.spans, case.ranks * case.spans.micro_batch
    generator = torch.Generator().manual_seed(case.seed)
    per_epoch = len(images) // each
    epochs = [
        torch.randperm(len(images), generator=generator)[: per_epoch * each].view(per_epoch, each)
        for _ in range(-(-spans.steps // per_epoch))
    ]
    order = torch.cat(epochs)

    def batches(step: int) -> list[Any]:
        pixels, labels = images.training(order[step], generator)
        return list(zip(pixels.chunk(case.ranks), labels.chunk(case.ranks)))

    def evaluate() -> tuple[float, float | None]:
        total = right = 0.0
        for pixels, labels in images.testing(360):
            logits = module(pixels)
            total += F.cross_entropy(logits, labels, reduction="sum").item()
            right += (logits.argmax(1) == labels).sum().item()
        return total / len(images.test[1]), right / len(images.test[1])

    return Task(
        module,
        stages,
        optimizer,
        batches,
        lambda module, batch: module(*batch),
        evaluate,
        lambda step: 0.05 * case.rate * 0.2 ** (step * 10 // (spans.steps * 3)),
        data,
    )


def _sources(megabytes: float, folders: list[Path], pattern: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Training and held-out bytes: a twentieth of all files, chosen by the hash of their names, is held out."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    size = 0
    for folder in folders:
        for path in sorted(folder.rglob(pattern)):
            if size < megabytes * 1e6 and path.is_file() and path.stat().st_size > 200:
                source = path.read_bytes()
                size += len(source)
                name = str(path.relative_to(folder)).encode()
                parts[hashlib.sha256(name).digest()[0] < 13].append(source)
    train, held_out = (torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in parts)
    return train, held_out


def _text(dataset: str, size: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The standard library; for the larger models, Python's sources of torch and what is installed beside it; to fine-tune on,
    torch's C++ headers."""
    if dataset in BETA1:
        return read_text(8.0)
    package = Path(torch.__file__).parent
    if dataset.endswith("-tuned"):
        return _sources(20.0 if size == "full" else 1.0, [package / "include"], "*.h")
    standard = Path(sysconfig.get_paths()["stdlib"])
    return _sources(80.0 if size == "full" else 1.0, [package, standard], "*.py")


def _gpt(case: Case, device: torch.device) -> Task:
    """A byte-level GPT on source code; linear warm-up, cosine to a tenth. ``...-tuned`` starts from weights trained on Python."""
    layers, width, heads, length, windows = GPTS[case.dataset][case.size]
    train, held_out = _text(case.dataset, case.size)
    data = hashlib.sha256(train.numpy().tobytes()).hexdigest()[:12]
    module, spans = GPT(layers, width, heads, length), case.spans
    fixed = sample(held_out, windows, length, torch.Generator().manual_seed(0), torch.device("cpu"))
    stages = stages_of(module, case.ranks, Example(tuple(t[:1] for t in fixed)))
    module.to(device)
    fixed = tuple(t.to(device) for t in fixed)
    tuned = case.dataset.endswith("-tuned")
    if tuned:
        module.load_state_dict(_pretrained(case, device))
    optimizer = optimizer_of(case.optimizer, module, BETA1.get(case.dataset, 0.9))
    generator = torch.Generator().manual_seed(case.seed)

    def loss(module: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return module(*batch)

    def batches(step: int) -> list[Any]:
        tokens, targets = sample(train, case.ranks * spans.micro_batch, length, generator, device)
        return list(zip(tokens.chunk(case.ranks), targets.chunk(case.ranks)))

    def evaluate() -> tuple[float, None]:
        parts = list(zip(*(t.split(64) for t in fixed)))
        return sum(loss(module, part).item() * len(part[0]) for part in parts) / windows, None

    def rate(step: int) -> float:
        warm = max(1, spans.steps // 20)
        progress = max(0.0, (step - warm) / (spans.steps - warm))
        highest = RATES[case.optimizer] * case.rate * (TUNING if tuned else 1.0)
        return highest * min((step + 1) / warm, 0.55 + 0.45 * math.cos(math.pi * progress))

    return Task(module, stages, optimizer, batches, loss, evaluate, rate, data)


def _pretrained(case: Case, device: torch.device) -> dict[str, torch.Tensor]:
    """Weights of the case's model after some steps of AdamW on Python's sources; trained once, and kept in a temporary file."""
    source = case.dataset.removesuffix("-tuned")
    name = f"{source}-{case.size}-{PRETRAINING[case.size]}-{device.type}-torch{torch.__version__}"
    path = Path(tempfile.gettempdir()) / f"pretrained-{name}.pt"
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes that need the same weights wait for the first
        if not path.exists():
            torch.manual_seed(0)
            task = _gpt(Case(source, 1.0, "dp", 0, 4, case.size), device)
            ring = Simulator(task.module, task.optimizer, task.stages, "dp", clip=1.0)
            captured = None
            for step in range(PRETRAINING[case.size]):
                for group in task.optimizer.param_groups:
                    group["lr"] = RATES["adamw"] * min(1.0, (step + 1) / 100, (PRETRAINING[case.size] - step) / 500)
                batches = task.batches(step)
                if device.type == "cuda" and step == _EAGER_STEPS:
                    captured = ring.captured(batches, task.loss)
                captured(batches) if captured else ring.step(batches, task.loss)
            torch.save(task.module.state_dict(), f"{path}.new")
            Path(f"{path}.new").rename(path)
    return torch.load(path, map_location=device, weights_only=True)


TASKS = {"digits": _digits, **dict.fromkeys(GPTS, _gpt)}


def run(case: Case, device: torch.device, graph: bool) -> Iterator[dict[str, Any]]:
    """Train one case; a row after every ``every`` steps, the first before any.

    Args:
        graph: replay forwards and backwards as a CUDA graph. If capturing fails, steps run without a graph, and the rows say so.
    """
    torch.manual_seed(case.seed)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    task, spans = TASKS[case.dataset](case, device), case.spans
    ring = Simulator(
        task.module,
        task.optimizer,
        task.stages,
        case.rule.removesuffix("-warmup"),
        warmup_steps=case.warmup_steps,
        clip=1.0 if case.dataset in GPTS else 0.0,
        delay_correction=case.delay_correction,
    )
    parameters = sum(p.numel() for p in task.module.parameters())
    began, captured, captured_for, losses = time.perf_counter(), None, None, []
    for step in range(spans.steps + 1):
        if step % spans.every == 0 or step == spans.steps:
            task.module.eval()
            with torch.no_grad():
                test_loss, accuracy = task.evaluate()
            task.module.train()
            mean = torch.stack(losses).mean().item() if losses else None
            losses = []
            yield {
                "dataset": case.dataset,
                "optimizer": case.optimizer,
                "rate": f"{case.rate:g}",
                "rule": case.rule,
                "correction": case.correction,
                "seed": case.seed,
                "step": step,
                "steps": spans.steps,
                "train_loss": _number(mean),
                "test_loss": _number(test_loss),
                "test_accuracy": _number(accuracy),
                "seconds": f"{time.perf_counter() - began:.2f}",
                "ranks": case.ranks,
                "micro_batch": spans.micro_batch,
                "parameters": parameters,
                "graph": captured is not None,
                "data": task.data,
            }
        if step == spans.steps:
            return
        for group in task.optimizer.param_groups:
            group["lr"] = task.rate(step)
        batches = task.batches(step)
        if graph and step >= _EAGER_STEPS and captured_for != ring.delayed:
            try:
                captured, captured_for = ring.captured(batches, task.loss), ring.delayed
            except RuntimeError as error:
                print(f"no CUDA graph: {error}", file=sys.stderr, flush=True)
                captured, graph = None, False
        elif captured_for is not None and captured_for != ring.delayed:
            captured = captured_for = None
        losses.append((captured(batches) if captured else ring.step(batches, task.loss)).mean().clone())


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
