"""ResNets (He et al. 2015) as a run of blocks, which are the units that the engine hands off."""

import torch
import torch.nn.functional as F
from torch import nn


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """Convolution and batch norm: (batch, inputs, h, w) -> (batch, outputs, h / stride, w / stride)."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs))


class Block(nn.Module):
    """Two 3 x 3 convolutions (``basic``), or 1 x 1, 3 x 3, 1 x 1 with four times the channels at the end, round a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int, basic: bool) -> None:
        super().__init__()
        outputs = width if basic else 4 * width
        if basic:
            self.body = nn.Sequential(_conv(inputs, width, 3, stride), nn.ReLU(), _conv(width, width, 3))
        else:
            self.body = nn.Sequential(
                _conv(inputs, width, 1), nn.ReLU(), _conv(width, width, 3, stride), nn.ReLU(), _conv(width, outputs, 1)
            )
        self.shortcut = _conv(inputs, outputs, 1, stride) if stride > 1 or inputs != outputs else nn.Identity()
        self.outputs = outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """model(images) -> logits, model(images, labels) -> mean cross-entropy.

    Args:
        depths: blocks per resolution, each half the one before.
        basic: see ``Block``.
        width: channels at the first resolution.
        stem: ``"small"``: 3 x 3, stride 1, no pooling (the paper's change for CIFAR); ``"imagenet"``: 7 x 7, stride 2, pooling.
        size: of the images, for ``example_input_array``, by which stages are cut by FLOPs.
    """

    def __init__(
        self,
        depths: tuple[int, ...],
        basic: bool,
        classes: int,
        stem: str = "imagenet",
        width: int = 64,
        channels: int = 3,
        size: int = 224,
    ) -> None:
        super().__init__()
        first = (
            [_conv(channels, width, 3), nn.ReLU()]
            if stem == "small"
            else [*_conv(channels, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        )
        self.stem = nn.Sequential(*first)
        blocks, inputs = [], width
        for i, depth in enumerate(depths):
            for j in range(depth):
                blocks.append(Block(inputs, width * 2**i, 2 if i and not j else 1, basic))
                inputs = blocks[-1].outputs
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(inputs, classes)
        self.example_input_array = torch.zeros(1, channels, size, size)
        for module in self.modules():  # as torchvision's, which the paper's experiments used
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x.mean((2, 3)))
        return logits if labels is None else F.cross_entropy(logits, labels)


def resnet(name: str, dataset: str) -> ResNet:
    """``resnet18`` or ``resnet50`` for ``cifar10`` or ``imagenet``; ``resnet14`` is a narrow one for ``digits``."""
    depths, basic = {"resnet14": ((2, 2, 2), True), "resnet18": ((2, 2, 2, 2), True), "resnet50": ((3, 4, 6, 3), False)}[name]
    kind = {
        "cifar10": {"classes": 10, "stem": "small", "size": 32},
        "imagenet": {"classes": 1000},
        "digits": {"classes": 10, "stem": "small", "channels": 1, "size": 8},
    }[dataset]
    return ResNet(depths, basic, width=16 if name == "resnet14" else 64, **kind)
