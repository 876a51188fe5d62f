"""The networks are the published ones: names, sizes, what they compute; real weights give the real accuracy."""

from __future__ import annotations

import os
import re
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from conftest import SHARED, load_shared
from poise.zoo import NETWORKS, NORMALIZATIONS, load_weights, network
from poise.zoo.networks import ResNet

CHECKPOINT = SHARED.parent / "models" / "cifar10-resnet56.safetensors"

MILLIONS = {
    "resnet50": (23.52, 23.71, 2048),
    "resnet110": (45.86, 46.05, 2048),
    "wide-resnet-26-10": (36.48, 36.54, 640),
    "densenet121": (6.96, 7.05, 1024),
    "resnet20": (0.27, 0.28, 64),
    "resnet56": (0.85, 0.86, 64),
}
"""Parameters with 10 and with 100 classes, and features."""

BATCH_NORM = r"(weight|bias|running_mean|running_var|num_batches_tracked)"
BOTTLENECK = rf"layer[1-4]\.\d+\.(conv[123]\.weight|bn[123]\.{BATCH_NORM}|shortcut\.(0\.weight|1\.{BATCH_NORM}))"
BASIC = rf"layer[1-3]\.\d+\.(conv[12]\.weight|bn[12]\.{BATCH_NORM}"
KEYS = {
    "resnet50": (BOTTLENECK, "fc"),
    "resnet110": (BOTTLENECK, "fc"),
    "wide-resnet-26-10": (rf"{BASIC}|downsample\.(0\.weight|1\.{BATCH_NORM}))", "fc"),
    "densenet121": (
        rf"dense[1-4]\.\d+\.(bn[12]\.{BATCH_NORM}|conv[12]\.weight)|trans[1-3]\.(bn\.{BATCH_NORM}|conv\.weight)"
        rf"|bn\.{BATCH_NORM}",
        "linear",
    ),
    "resnet20": (f"{BASIC})", "linear"),
    "resnet56": (f"{BASIC})", "linear"),
}
BLOCKS = {
    "resnet50": {"layer1": 3, "layer2": 4, "layer3": 6, "layer4": 3},
    "resnet110": {"layer1": 3, "layer2": 4, "layer3": 26, "layer4": 3},
    "wide-resnet-26-10": {"layer1": 4, "layer2": 4, "layer3": 4},
    "densenet121": {"dense1": 6, "dense2": 12, "dense3": 24, "dense4": 16},
    "resnet20": {"layer1": 3, "layer2": 3, "layer3": 3},
    "resnet56": {"layer1": 9, "layer2": 9, "layer3": 9},
}
each = pytest.mark.parametrize("name", NETWORKS)


@each
def test_parameters(name):
    *millions, num_features = MILLIONS[name]
    with torch.device("meta"):
        built = [network(name, num_classes) for num_classes in (10, 100)]
    counts = [sum(parameter.numel() for parameter in net.parameters()) for net in built]
    assert [round(count / 1e6, 2) for count in counts] == millions
    assert counts[1] - counts[0] == 90 * (num_features + 1)


@each
def test_names_are_the_published_ones(name):
    with torch.device("meta"):
        keys = set(network(name).state_dict())
    block, last = KEYS[name]
    stem = rf"conv1\.weight|bn1\.{BATCH_NORM}" if "dense" not in name else r"conv1\.weight"
    assert not [key for key in keys if not re.fullmatch(rf"{stem}|{block}|{last}\.(weight|bias)", key)]
    counts = {stage: len({key.split(".")[1] for key in keys if key.startswith(f"{stage}.")}) for stage in BLOCKS[name]}
    assert counts == BLOCKS[name]


def norm(x, w, name):
    mean, var = w[f"{name}.running_mean"], w[f"{name}.running_var"]
    return F.batch_norm(x, mean, var, w[f"{name}.weight"], w[f"{name}.bias"])


def conv(x, w, name, stride=1):
    weight = w[f"{name}.weight"]
    return F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)


def residual_reference(x, w, blocks, shortcut, last):
    """Post-activation residual network out of its tensors alone: every convolution is followed by its norm."""
    x = torch.relu(norm(conv(x, w, "conv1"), w, "bn1"))
    for stage, count in blocks.items():
        for index in range(count):
            at = f"{stage}.{index}"
            stride = 2 if index == 0 and stage != "layer1" else 1
            num_convs = 3 if f"{at}.conv3.weight" in w else 2
            y = x
            for number in range(1, num_convs + 1):
                # The 3 × 3 convolution of a bottleneck strides, and the first one of a basic block.
                y = conv(y, w, f"{at}.conv{number}", stride if number == num_convs - 1 else 1)
                y = norm(y, w, f"{at}.bn{number}")
                y = torch.relu(y) if number < num_convs else y
            if f"{at}.{shortcut}.0.weight" in w:
                x = norm(conv(x, w, f"{at}.{shortcut}.0", stride), w, f"{at}.{shortcut}.1")
            elif y.shape != x.shape:
                x, missing = x[:, :, ::2, ::2], y.shape[1] - x.shape[1]
                zeros = torch.zeros(len(x), missing // 2, *x.shape[2:])
                x = torch.cat([zeros, x, zeros], 1)
            x = torch.relu(x + y)
    return F.linear(x.mean((2, 3)), w[f"{last}.weight"], w[f"{last}.bias"])


def dense_reference(x, w, blocks):
    x = conv(x, w, "conv1")
    for number, (stage, count) in enumerate(blocks.items(), start=1):
        for index in range(count):
            at = f"{stage}.{index}"
            y = conv(torch.relu(norm(x, w, f"{at}.bn1")), w, f"{at}.conv1")
            x = torch.cat([conv(torch.relu(norm(y, w, f"{at}.bn2")), w, f"{at}.conv2"), x], 1)
        if number < len(blocks):
            x = F.avg_pool2d(conv(torch.relu(norm(x, w, f"trans{number}.bn")), w, f"trans{number}.conv"), 2)
    return F.linear(torch.relu(norm(x, w, "bn")).mean((2, 3)), w["linear.weight"], w["linear.bias"])


def with_lived_in_norms(net: nn.Module) -> nn.Module:
    """Fresh norms are nearly the identity, which would hide a missing or misplaced one."""
    generator = torch.Generator().manual_seed(1)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor, low in ((module.weight.data, 0.5), (module.bias.data, -0.5), (module.running_mean, -0.5)):
                tensor.copy_(low + torch.rand(tensor.shape, generator=generator))
            module.running_var.copy_(0.5 + torch.rand(module.running_var.shape, generator=generator))
    return net


@each
@torch.inference_mode()
def test_they_compute_what_is_published(name):
    torch.manual_seed(0)
    net = with_lived_in_norms(network(name, 7)).eval()
    # 16 pixels a side exercise the same layers as 32 in a quarter of the time.
    images = torch.randn(2, 3, 16, 16)
    if "dense" in name:
        expected = dense_reference(images, net.state_dict(), BLOCKS[name])
    else:
        shortcut = "downsample" if "wide" in name else "shortcut"
        expected = residual_reference(images, net.state_dict(), BLOCKS[name], shortcut, KEYS[name][1])
    torch.testing.assert_close(net(images), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@each
@torch.inference_mode()
def test_features_make_the_logits(name):
    net = network(name, 5).eval()
    features = []
    net.get_submodule(net.feature_layer).register_forward_hook(lambda module, inputs, output: features.append(output))
    logits = net(torch.randn(2, 3, 16, 16))
    assert features[0].shape == (2, MILLIONS[name][2])
    last = net.get_submodule(KEYS[name][1])
    assert torch.equal(last(features[0]), logits)


def test_wide_resnet_starts_by_fan_out():
    torch.manual_seed(0)
    weight = network("wide-resnet-26-10").layer1[0].conv1.weight
    assert weight.std().item() == pytest.approx((2 / (9 * 160)) ** 0.5, rel=0.02)


def test_shared_checkpoint_is_the_shared_network():
    """The real ResNet-56 on real images: its accuracy, and logits and features that stand in the published tables."""
    load_shared("cifar10-resnet56-ce", "test")  # skips where the data is not
    tables = [np.load(SHARED / f"cifar10-resnet56-ce.{split}.npz") for split in ("val", "test")]
    stored = {key: torch.from_numpy(np.concatenate([table[key] for table in tables])) for key in ("logits", "features")}
    mosaic = np.asarray(Image.open(SHARED.parent / "cifar10" / "test_00.webp").convert("RGB"))
    tiles = mosaic.reshape(50, 32, 50, 32, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32)[:400]
    labels = torch.from_numpy(np.load(SHARED.parent / "cifar10" / "labels.npz")["test"][:400].astype(np.int64))
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    images = (torch.from_numpy(tiles) / 255 - mean[:, None, None]) / std[:, None, None]
    net = load_weights(network("resnet56"), CHECKPOINT).eval()
    assert isinstance(net, ResNet)
    with torch.inference_mode():
        logits, features = net(images), []
        net.pool.register_forward_hook(lambda module, inputs, output: features.append(output))
        net(images[:50])
    # 93.39 % on all 10,000; three standard errors of 400 are 3.7 points.
    assert (logits.argmax(1) == labels).float().mean() > 0.897
    # The tables are in another order: each image's row must be somewhere in them.
    nearest = torch.cdist(logits[:50].double(), stored["logits"].double()).argmin(1)
    assert len(nearest.unique()) == 50
    torch.testing.assert_close(logits[:50], stored["logits"][nearest], rtol=0, atol=1e-3)
    torch.testing.assert_close(features[0], stored["features"][nearest].float(), rtol=0, atol=1e-3)


@pytest.mark.parametrize("suffix", [".safetensors", ".model", ".pth"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_checkpoints_load(tmp_path, suffix, prefix):
    torch.manual_seed(3)
    trained = with_lived_in_norms(network("resnet20", 4))
    weights = {prefix + name: value for name, value in trained.state_dict().items()}
    path = tmp_path / f"net{suffix}"
    if suffix == ".safetensors":
        save_file(weights, path)
    else:
        torch.save({"epoch": 350, "state_dict": weights} if suffix == ".pth" else weights, path)
    loaded = load_weights(network("resnet20", 4), path)
    for name, value in trained.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("harm",)


def test_wrong_checkpoints_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net = network("resnet20", 4)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    good = net.state_dict()
    torch.save(network("resnet56", 4).state_dict(), "deeper.pt")
    torch.save(network("resnet20", 5).state_dict(), "wider.pt")
    torch.save({**good, "conv1.weight": good["conv1.weight"] * torch.nan}, "nan.pt")
    torch.save([1, 2], "list.pt")
    torch.save({"weights": Evil()}, "evil.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "wider.pt").read_bytes()[:5000])
    (tmp_path / "cut.safetensors").write_bytes(b"\x10")
    for path, sentence in {
        "deeper.pt": "another network than this ResNet: it has besides 'layer1.3",
        "wider.pt": r"linear.weight has shape \(5, 64\) where \(4, 64\) is wanted; check",
        "nan.pt": "NaN or infinity in conv1.weight",
        "list.pt": "must hold a network's tensors by name",
        "evil.pt": "cannot be read as a checkpoint",
        "cut.pt": "truncated or of another kind",
        "cut.safetensors": "truncated or of another kind",
        "wide.pt": "did you mean 'wider.pt'",
    }.items():
        with pytest.raises((ValueError, FileNotFoundError), match=sentence):
            load_weights(net, path)
        assert all(torch.equal(net.state_dict()[name], value) for name, value in before.items())
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("resnet5", "did you mean 'resnet56' or 'resnet50'"),
        ("wideresnet", "did you mean 'wide-resnet-26-10'"),
        ("xyz", r"but is 'xyz'\.$"),
        ("timm/resnet50", "needs timm: pip install timm"),
        ("torchvision/resnet50", "needs torchvision: pip install torchvision"),
    ],
)
def test_unknown_names_are_refused(name, sentence, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    with pytest.raises((ValueError, ImportError), match=sentence):
        network(name)


def test_other_bad_requests_are_refused():
    with pytest.raises(ValueError, match="num_classes must be 2 or more"):
        network("resnet20", 1)
    with pytest.raises(ValueError, match="read a checkpoint"):
        network("resnet20", pretrained=True)


class Pretrained(nn.Module):
    """A stand-in for an ImageNet network: features go through a pool and a dropout into the last layer."""

    def __init__(self, num_classes, depth=1):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 16, 16), nn.ReLU())
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.drop = nn.Dropout(0.5) if depth == 2 else None
        self.fc = nn.Linear(6, num_classes)

    def forward(self, x):
        x = self.avgpool(self.stem(x)).flatten(1)
        return self.fc(x if self.drop is None else self.drop(x))


class Tokens(Pretrained):
    def forward(self, x):
        return self.fc(self.stem(x).flatten(2).transpose(1, 2)[:, 0])


def test_imagenet_networks_by_name(monkeypatch):
    """Neither library is needed here: what is called is their public interface."""
    asked = []

    def create_model(name, pretrained, num_classes):
        asked.append((name, pretrained))
        made = Pretrained(num_classes, depth=2)
        made.pretrained_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.4, 0.5, 0.5)}
        return made

    timm = ModuleType("timm")
    timm.list_models = lambda: ["resnet50", "vit_b"]
    timm.create_model = create_model
    torchvision = ModuleType("torchvision.models")
    torchvision.list_models = lambda: ["resnet50", "vit_b"]
    torchvision.get_model = lambda name, weights=None, num_classes=1000: (
        Tokens(num_classes) if name == "vit_b" else Pretrained(num_classes)
    )
    monkeypatch.setitem(sys.modules, "timm", timm)
    monkeypatch.setitem(sys.modules, "torchvision.models", torchvision)

    net = network("timm/resnet50", 1000, pretrained=True)
    assert net.feature_layer == "drop"
    assert net.normalization == ((0.5, 0.5, 0.5), (0.4, 0.5, 0.5))
    assert asked == [("resnet50", True)]
    net = network("torchvision/resnet50", 12)
    assert net.feature_layer == "avgpool"
    assert net.normalization == NORMALIZATIONS["imagenet"]
    assert net.training
    assert net(torch.zeros(1, 3, 224, 224)).shape == (1, 12)
    assert network("torchvision/resnet50", 1000, pretrained=True).fc.out_features == 1000
    with pytest.raises(ValueError, match="torchvision has no network 'resnet51'; did you mean 'resnet50'"):
        network("torchvision/resnet51")
    with pytest.raises(ValueError, match="no layer of Tokens gives out its features alone"):
        network("torchvision/vit_b", 5)
