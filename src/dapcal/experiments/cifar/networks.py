"""Wide residual networks, whose training images are shifted and flipped on their way in."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, relu

MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of CIFAR-10's training pixels, by colour


def wide_resnet(rate: float) -> nn.Module:
    """WideResNet-28-10, 36.5 million parameters."""
    return WideResNet(28, 10, rate=rate, erased=8)


def small_resnet(rate: float) -> nn.Module:
    """A small ResNet (WideResNet-10-1, first convolution of stride 2), 78 thousand parameters; not the paper's."""
    return WideResNet(10, 1, stride=2, rate=rate)


class WideResNet(nn.Module):
    """Zagoruyko, Komodakis (2016), arXiv:1605.07146, of images (N, 3, H, W) with pixels between 0 and 1.

    On a GPU all but the last layer runs in bfloat16 and with channels last, in training and afterwards; features and
    logits are float32.

    Args:
        depth: 6n + 4 layers, n blocks in each of three groups.
        width: how many times 16, 32 and 64 channels the groups have.
        stride: of the first convolution.
        rate: of dropout inside blocks.
        classes: logits.
        erased: side of the square of mean colour that training images get; 0 for none.
    """

    halved: ClassVar[tuple[str, ...]] = ("cuda",)  # kinds of devices with bfloat16
    mean: Tensor
    deviation: Tensor

    def __init__(
        self, depth: int, width: int, stride: int = 1, rate: float = 0.0, classes: int = 10, erased: int = 0
    ) -> None:
        super().__init__()
        if depth < 10 or depth % 6 != 4:
            raise ValueError(f"Expected `depth` as 6n + 4 with n >= 1, got {depth}; take 10, 16, 22 or 28")
        self.erased = erased
        channels = [16, 16 * width, 32 * width, 64 * width]
        self.register_buffer("mean", torch.tensor(MEAN)[:, None, None])
        self.register_buffer("deviation", torch.tensor(DEVIATION)[:, None, None])
        self.stem = nn.Conv2d(3, 16, 3, stride, 1, bias=False)
        groups = []
        for place, (inside, outside) in enumerate(pairwise(channels)):
            first = Block(inside, outside, 1 if place == 0 else 2, rate)
            groups.append(
                nn.Sequential(first, *(Block(outside, outside, 1, rate) for _ in range((depth - 4) // 6 - 1)))
            )
        self.groups = nn.Sequential(*groups)
        self.norm = nn.BatchNorm2d(channels[-1])
        self.head = nn.Linear(channels[-1], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, classes)."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.device.type in self.halved):
            z = ((augmented(x) if self.training else x) - self.mean) / self.deviation
            z = with_squares(z, self.erased) if self.training and self.erased else z
            z = self.groups(self.stem(z.contiguous(memory_format=torch.channels_last)))
            z = relu(self.norm(z)).mean((2, 3))
        with torch.autocast(x.device.type, enabled=False):
            return self.head(z.to(self.head.weight.dtype))


class Block(nn.Module):
    """Two convolutions, each after batch norm and ReLU, beside a shortcut."""

    def __init__(self, inside: int, outside: int, stride: int, rate: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm2d(inside), nn.BatchNorm2d(outside)])
        self.one = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.dropout = nn.Dropout(rate) if rate else nn.Identity()
        same = stride == 1 and inside == outside
        self.short = None if same else nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, C, H, W)."""
        open_to = relu(self.norms[0](x))
        beside = x if self.short is None else self.short(open_to)
        return self.two(self.dropout(relu(self.norms[1](self.one(open_to))))) + beside


def augmented(x: Tensor, most: int = 4) -> Tensor:
    """Images (N, C, H, W), each flipped with probability ½ and shifted by up to `most` pixels, zeros coming in."""
    n, _, height, width = x.shape
    x = torch.where(torch.rand(n, 1, 1, 1, device=x.device) < 0.5, x.flip(3), x)
    down, right = torch.randint(2 * most + 1, (2, n, 1), device=x.device)
    rows, columns = down + torch.arange(height, device=x.device), right + torch.arange(width, device=x.device)
    images = torch.arange(n, device=x.device)[:, None, None]
    return pad(x, [most] * 4)[images, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def with_squares(x: Tensor, side: int) -> Tensor:
    """Images (N, C, H, W) with zeros in a square around a random pixel (DeVries, Taylor 2017, arXiv:1708.04552)."""
    n, _, height, width = x.shape
    row = torch.randint(height, (n, 1, 1, 1), device=x.device) - torch.arange(height, device=x.device)[:, None]
    column = torch.randint(width, (n, 1, 1, 1), device=x.device) - torch.arange(width, device=x.device)
    inside = (row >= -(side // 2)) & (row < side - side // 2) & (column >= -(side // 2)) & (column < side - side // 2)
    return torch.where(inside, 0.0, x)
