"""Trains a ResNet on CIFAR-10, ImageNet or the bundled digits, as the paper's experiments did (Tables 2a and 2b).

    deepspeed --num_gpus 4 examples/cifar10.py --data cifar-10-python.tar.gz --deepspeed --deepspeed_config FILE
    deepspeed --num_gpus 4 examples/cifar10.py --dataset imagenet --data FOLDER --deepspeed --deepspeed_config FILE
    python examples/cifar10.py --data cifar-10-python.tar.gz --simulate-ranks 4 --rule cdp-v1

The first two are ordinary DeepSpeed; the rule and the micro-batch are in FILE (examples/images_ds_config.json). The last needs
one GPU or none: the same mathematics for so many ranks in one process, without DeepSpeed. The paper's own experiments have 8
workers with 64 images each and 4 stages (--simulate-ranks 8 --stages 4 --micro-batch 64); a ring of the engine has as many stages
as ranks.

Known from the authors' repository: SGD with momentum 0.9, the rates and decays below, a drop of the rate every 30 epochs, 512
images a step for CIFAR-10 and 256 for ImageNet, stages by FLOPs, a 3 x 3 first layer without pooling for CIFAR-10. Assumed:
random crops of images padded by 4 and mirroring for CIFAR-10; random resized crops and mirroring for ImageNet; testing with
rank 0's batch statistics (theirs averages them over workers).
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import images
import torch
import torch.nn.functional as F
from resnet import resnet
from torch import nn
from tqdm import tqdm


@dataclass(frozen=True)
class Recipe:
    """Learning rate, weight decay by model, factor of a drop, epochs between drops, epochs, default micro-batch."""

    rate: float
    decay: dict[str, float]
    drop: float
    every: int
    epochs: int
    micro_batch: int


RECIPES = {
    "cifar10": Recipe(0.05, {"resnet18": 5e-4, "resnet50": 1e-3}, 0.2, 30, 100, 128),
    "imagenet": Recipe(0.1, {"resnet18": 1e-4, "resnet50": 1e-4}, 0.1, 30, 90, 64),
    "digits": Recipe(0.05, {"resnet14": 5e-4}, 0.2, 12, 40, 32),
}


def load(args: argparse.Namespace) -> Any:
    if args.dataset == "digits":
        return images.digits()
    return images.cifar10(args.data) if args.dataset == "cifar10" else images.ImageNet(args.data, args.workers)


@torch.no_grad()
def test(model: Callable[..., Any], data: Any) -> tuple[float, float]:
    """Loss and accuracy on the test set."""
    total, right, count = 0.0, 0, 0
    for pixels, labels in data.testing(256):
        logits = model(pixels)
        total += F.cross_entropy(logits, labels, reduction="sum").item()
        right += (logits.argmax(1) == labels).sum().item()
        count += len(labels)
    return total / count, right / count


def simulate(
    args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, data: Any
) -> list[tuple[float, float]]:
    """All ranks in this process; the test results."""
    from deepspeed_cdp.analysis.learning_simulator import Simulator, stages_of
    from deepspeed_cdp.model.discover import example_of

    ranks = args.simulate_ranks
    stages = stages_of(model, args.stages or ranks, example_of(model))
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    data, model = data.to(device), model.to(device)
    ring = Simulator(
        model, optimizer, stages, args.rule, ranks=ranks, warmup_steps=args.warmup_steps, delay_correction=args.delay_correction
    )
    results = []
    for epoch in range(args.epochs):
        by_rank = [data.epoch(args.seed, epoch, rank, ranks, args.micro_batch) for rank in range(ranks)]
        steps = len(data) // (ranks * args.micro_batch)
        for batches in tqdm(zip(*by_rank), f"epoch {epoch}", steps, unit="step", mininterval=2, leave=False):
            losses = ring.step(batches, lambda model, batch: model(*batch))
            scheduler.step()
        if (epoch + 1) % args.test_every == 0 or epoch + 1 == args.epochs:
            ring.flush()  # as the engine does before it evaluates
            model.eval()
            results.append(test(model, data))
            model.train()
            tell(args, epoch, losses[0].item(), *results[-1])
    return results


def train(
    args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, data: Any
) -> list[tuple[float, float]]:
    """One rank of a DeepSpeed run; the test results."""
    import deepspeed

    engine, *_ = deepspeed.initialize(args=args, model=model, optimizer=optimizer, lr_scheduler=scheduler)
    rank, ranks, micro_batch = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size(), engine.train_micro_batch_size_per_gpu()
    data = data.to(engine.device)
    results = []
    for epoch in range(args.epochs):
        batches, steps = data.epoch(args.seed, epoch, rank, ranks, micro_batch), len(data) // (ranks * micro_batch)
        for pixels, labels in tqdm(batches, f"epoch {epoch}", steps, unit="step", mininterval=2, leave=False, disable=rank > 0):
            loss = engine(pixels, labels)
            engine.backward(loss)
            engine.step()
        if (epoch + 1) % args.test_every == 0 or epoch + 1 == args.epochs:
            engine.eval()
            results.append(test(engine, data))
            engine.train()
            if rank == 0:
                tell(args, epoch, loss.item(), *results[-1])
    engine.destroy()
    return results


def tell(args: argparse.Namespace, epoch: int, training: float, loss: float, accuracy: float) -> None:
    print(
        f"epoch {epoch + 1}/{args.epochs}: training loss {training:.4f}, test loss {loss:.4f}, "
        f"test accuracy {100 * accuracy:.2f}% ({time.perf_counter() - args.began:.0f} s)",
        flush=True,
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="cifar10", choices=tuple(RECIPES))
    parser.add_argument("--data", default="", help="CIFAR-10's archive or folder; the folder with ImageNet's train and val")
    parser.add_argument("--model", default="", help="resnet18 (default) or resnet50; resnet14 for digits")
    parser.add_argument("--epochs", type=int, default=0, help="default: the recipe's")
    parser.add_argument("--test-every", type=int, default=10, help="epochs; testing flushes, so the delay starts anew after it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=8, help="processes that decode ImageNet, per rank")
    parser.add_argument("--simulate-ranks", type=int, default=0, help="simulate so many ranks in this process; no launcher")
    parser.add_argument("--stages", type=int, default=0, help="with --simulate-ranks; default: as many as ranks")
    parser.add_argument("--rule", default="cdp-v2", help="with --simulate-ranks; else it is in the config")
    parser.add_argument("--warmup-steps", type=int, default=0, help="with --simulate-ranks: first steps under dp")
    parser.add_argument("--delay-correction", default="auto", help="with --simulate-ranks: what stale readers read")
    parser.add_argument("--micro-batch", type=int, default=0, help="with --simulate-ranks; default: the recipe's")
    parser.add_argument("--device", default="", help="with --simulate-ranks")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("--deepspeed", action="store_true", help="as in any DeepSpeed script")
    parser.add_argument("--deepspeed_config", default=None)
    args = parser.parse_args(argv)
    recipe = RECIPES[args.dataset]
    args.model = args.model or next(iter(recipe.decay))
    if args.model not in recipe.decay:
        parser.error(f"--model is {args.model!r}; allowed for {args.dataset} are {', '.join(recipe.decay)}")
    if not args.data and args.dataset != "digits":
        parser.error(f"--data must say where {args.dataset} is; or use --dataset digits, which is bundled")
    if not args.simulate_ranks and not args.deepspeed_config:
        parser.error("give --simulate-ranks N, or start with deepspeed and --deepspeed_config (see --help)")
    args.epochs = args.epochs or recipe.epochs
    args.micro_batch = args.micro_batch or recipe.micro_batch
    args.rule = int(args.rule) if args.rule.isdigit() else args.rule
    args.began = time.perf_counter()
    return args


def main(argv: list[str] | None = None) -> list[tuple[float, float]]:
    args = parse(argv)
    recipe = RECIPES[args.dataset]
    if args.simulate_ranks:
        per_step = args.micro_batch * args.simulate_ranks
    else:
        import deepspeed

        deepspeed.init_distributed()
        config = json.loads(Path(args.deepspeed_config).read_text())
        per_step = config["train_micro_batch_size_per_gpu"] * deepspeed.comm.get_world_size()
    data = load(args)
    torch.manual_seed(args.seed)
    model = resnet(args.model, args.dataset)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.rate, momentum=0.9, weight_decay=recipe.decay[args.model])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, recipe.every * (len(data) // per_step), recipe.drop)
    return (simulate if args.simulate_ranks else train)(args, model, optimizer, scheduler, data)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        raise SystemExit(str(error)) from None
