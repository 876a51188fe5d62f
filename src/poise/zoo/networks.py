"""Image classifiers by name: the paper's CIFAR networks, He's, and the ImageNet networks of timm and torchvision.

What they return are logits. The layers are called as in the published checkpoints, so that those load.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from poise.zoo.datasets.images import NORMALIZATIONS, Normalization
from poise.zoo.words import nearest


def network(name: str, num_classes: int = 10, *, pretrained: bool = False) -> nn.Module:
    """The network of that name with untrained weights from torch's global generator; `NETWORKS` lists the names.

    ``timm/NAME`` and ``torchvision/NAME`` are the ImageNet networks of those libraries, with their weights if
    `pretrained`; the published CIFAR networks come without, and are filled by `load_weights`. Every network has
    `feature_layer`, the name of the layer whose output is its features, and the last layer makes the logits of them;
    those of the two libraries also say their `normalization`.

    >>> net = network("resnet56", num_classes=10).eval()
    >>> net(torch.zeros(1, 3, 32, 32)).shape, net.feature_layer
    (torch.Size([1, 10]), 'pool')
    """
    library, model = named(name)
    if library:
        return _from_library(library, model, num_classes, pretrained)
    if pretrained:
        raise ValueError(f"{name} comes without weights; read a checkpoint with poise.zoo.load_weights.")
    if num_classes < 2:
        raise ValueError(f"num_classes must be 2 or more, but is {num_classes}; count the classes of the data.")
    return NETWORKS[name](num_classes)


def named(name: str) -> tuple[str, str]:
    """The library and the network that a name means, the library empty for those of `NETWORKS`; else an error."""
    library, _, model = name.rpartition("/")
    if library not in LIBRARIES and name not in NETWORKS:
        raise ValueError(
            f"network must be one of {', '.join(NETWORKS)}, or timm/NAME or torchvision/NAME, but is {name!r}"
            f"{nearest(name, NETWORKS)}"
        )
    return library, model


class GlobalPool(nn.Module):
    """The mean over all positions, (n, c, h, w) to (n, c); deterministic on GPUs, as torch's is not."""

    def forward(self, activations: Tensor) -> Tensor:
        return activations.mean((2, 3))


class Bottleneck(nn.Module):
    """1 × 1 to `width`, 3 × 3 with the stride, 1 × 1 to four times `width`, beside a shortcut."""

    expansion = 4

    def __init__(self, num_inputs: int, width: int, stride: int) -> None:
        super().__init__()
        num_outputs = self.expansion * width
        self.conv1, self.bn1 = _conv(num_inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = _conv(width, num_outputs, 1), nn.BatchNorm2d(num_outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or num_inputs != num_outputs:
            self.shortcut = nn.Sequential(_conv(num_inputs, num_outputs, 1, stride), nn.BatchNorm2d(num_outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class BasicBlock(nn.Module):
    """Two 3 × 3 convolutions beside a shortcut, which is a 1 × 1 convolution where the shape changes."""

    expansion = 1

    def __init__(self, num_inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(num_inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3), nn.BatchNorm2d(width)
        self.downsample = self._downsample(num_inputs, width, stride) if stride != 1 or num_inputs != width else None

    def _downsample(self, num_inputs: int, width: int, stride: int) -> nn.Module:
        return nn.Sequential(_conv(num_inputs, width, 1, stride), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class PaddedBlock(BasicBlock):
    """A basic block whose shortcut has no parameters where the shape changes."""

    def _downsample(self, num_inputs: int, width: int, stride: int) -> nn.Module:
        return _Pad(width - num_inputs, stride)


class _Pad(nn.Module):
    """Every `stride`-th pixel, and half of the missing channels as zeros on either side."""

    def __init__(self, num_missing: int, stride: int) -> None:
        super().__init__()
        self.before, self.after, self.stride = num_missing // 2, num_missing - num_missing // 2, stride

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.before, self.after))


class ResNet(nn.Module):
    """Residual network for small images: a 3 × 3 stem without pooling, then stages `layer1`, `layer2`, ...

    Every stage after the first halves the resolution. `last` names the last layer.
    """

    feature_layer = "pool"

    def __init__(
        self,
        num_classes: int,
        *,
        block: type[Bottleneck] | type[BasicBlock],
        num_blocks: Sequence[int],
        widths: Sequence[int],
        stem: int,
        last: str = "fc",
    ) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(3, stem, 3), nn.BatchNorm2d(stem)
        num_inputs = stem
        self.stages = [f"layer{number}" for number in range(1, len(widths) + 1)]
        for stage, count, width in zip(self.stages, num_blocks, widths, strict=True):
            blocks = [block(num_inputs, width, 1 if stage == "layer1" else 2)]
            num_inputs = block.expansion * width
            blocks += [block(num_inputs, width, 1) for _ in range(count - 1)]
            self.add_module(stage, nn.Sequential(*blocks))
        self.pool = GlobalPool()
        self.last = last
        self.add_module(last, nn.Linear(num_inputs, num_classes))

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(images)))
        for stage in self.stages:
            x = getattr(self, stage)(x)
        logits: Tensor = getattr(self, self.last)(self.pool(x))
        return logits


class WideResNet(ResNet):
    """A residual network with He's normal initialization by fan-out, as the published Wide-ResNet has it."""

    def __init__(self, num_classes: int, **shape: Any) -> None:
        super().__init__(num_classes, **shape)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class DenseLayer(nn.Module):
    """1 × 1 and 3 × 3 convolutions, each after normalization; the new channels come before the old ones."""

    def __init__(self, num_inputs: int, growth: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(num_inputs), _conv(num_inputs, 4 * growth, 1)
        self.bn2, self.conv2 = nn.BatchNorm2d(4 * growth), _conv(4 * growth, growth, 3)

    def forward(self, x: Tensor) -> Tensor:
        new = self.conv2(F.relu(self.bn2(self.conv1(F.relu(self.bn1(x))))))
        return torch.cat([new, x], 1)


class Transition(nn.Module):
    """Fewer channels by a 1 × 1 convolution, and half the resolution."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.bn, self.conv = nn.BatchNorm2d(num_inputs), _conv(num_inputs, num_outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(self.conv(F.relu(self.bn(x))), 2)


class DenseNet(nn.Module):
    """Densely connected network for small images: blocks `dense1` to `dense4`, transitions between them."""

    feature_layer = "pool"

    def __init__(self, num_classes: int, *, num_layers: Sequence[int], growth: int, compression: float = 0.5) -> None:
        super().__init__()
        width = 2 * growth
        self.conv1 = _conv(3, width, 3)
        self.blocks: list[str] = []
        for number, count in enumerate(num_layers, start=1):
            layers = [DenseLayer(width + index * growth, growth) for index in range(count)]
            self._add(f"dense{number}", nn.Sequential(*layers))
            width += count * growth
            if number < len(num_layers):
                narrower = math.floor(compression * width)
                self._add(f"trans{number}", Transition(width, narrower))
                width = narrower
        self.bn = nn.BatchNorm2d(width)
        self.pool = GlobalPool()
        self.linear = nn.Linear(width, num_classes)

    def _add(self, name: str, block: nn.Module) -> None:
        self.add_module(name, block)
        self.blocks.append(name)

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv1(images)
        for block in self.blocks:
            x = getattr(self, block)(x)
        logits: Tensor = self.linear(self.pool(F.relu(self.bn(x))))
        return logits


def _conv(num_inputs: int, num_outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(num_inputs, num_outputs, size, stride, padding=size // 2, bias=False)


def _he(num_blocks: int) -> Callable[[int], nn.Module]:
    """He, Zhang, Ren, Sun, CVPR 2016, section 4.2, of 6 n + 2 layers."""
    return partial(ResNet, block=PaddedBlock, num_blocks=[num_blocks] * 3, widths=(16, 32, 64), stem=16, last="linear")


_imagenet_widths = partial(ResNet, block=Bottleneck, widths=(64, 128, 256, 512), stem=64)

NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "resnet20": _he(3),
    "resnet56": _he(9),
    "resnet50": partial(_imagenet_widths, num_blocks=(3, 4, 6, 3)),
    "resnet110": partial(_imagenet_widths, num_blocks=(3, 4, 26, 3)),
    "wide-resnet-26-10": partial(WideResNet, block=BasicBlock, num_blocks=(4, 4, 4), widths=(160, 320, 640), stem=16),
    "densenet121": partial(DenseNet, num_layers=(6, 12, 24, 16), growth=32),
}
"""Networks for images of 32 × 32 pixels (they take larger ones too), by name, as functions of the number of classes.

The last four are those of Mukhoti et al., NeurIPS 2020, and so of the paper: its ResNet-110 is a ResNet-50 with 26
blocks in the third stage, and not He's narrow network of that depth.
"""

LIBRARIES = ("timm", "torchvision")
"""What comes before a slash in a name."""


def _from_library(library: str, model: str, num_classes: int, pretrained: bool) -> nn.Module:
    try:
        module = importlib.import_module("torchvision.models" if library == "torchvision" else library)
    except ImportError as error:
        raise ImportError(f"the network {library}/{model} needs {library}: pip install {library}.") from error
    known = module.list_models()
    if model not in known:
        raise ValueError(f"{library} has no network {model!r}{nearest(model, known)}")
    if library == "timm":
        found: nn.Module = module.create_model(model, pretrained=pretrained, num_classes=num_classes)
    else:
        # torchvision's trained networks have 1000 classes and no other number.
        found = module.get_model(model, **({"weights": "DEFAULT"} if pretrained else {"num_classes": num_classes}))
    found.feature_layer = feature_layer(found)  # type: ignore[assignment]
    # Where timm says what the weights were trained with; ViTs often have means and deviations of one half.
    told = getattr(found, "pretrained_cfg", {})
    usual = NORMALIZATIONS["imagenet"]
    found.normalization = Normalization(  # type: ignore[assignment]
        tuple(told.get("mean", usual.mean)), tuple(told.get("std", usual.std))
    )
    return found


@torch.no_grad()
def feature_layer(network: nn.Module, image_size: int = 224) -> str:
    """The name of the layer whose output, flattened, goes into the last linear layer; found by showing one image."""
    linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    outputs: list[tuple[str, Tensor]] = []
    features: list[Tensor] = []

    def remember(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        if linear and name == linear[-1]:
            features.append(inputs[0])
        elif isinstance(output, Tensor) and not features:
            outputs.append((name, output))

    hooks = [module.register_forward_hook(partial(remember, name)) for name, module in network.named_modules() if name]
    was_training = network.training
    try:
        network.eval()(torch.rand(1, 3, image_size, image_size, generator=torch.Generator().manual_seed(0)))
    finally:
        network.train(was_training)
        for hook in hooks:
            hook.remove()
    same = [name for name, output in outputs if features and torch.equal(output.flatten(), features[0].flatten())]
    if not same:
        raise ValueError(
            f"no layer of {type(network).__name__} gives out its features alone, so that they could be perturbed; "
            "take a network that ends in a pool and a linear layer."
        )
    return same[-1]
