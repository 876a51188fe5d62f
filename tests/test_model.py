"""Networks cut at a layer or rerun give the same numbers, and wrapped ones give the calibrator's, wherever they go."""

from __future__ import annotations

import io
import subprocess
import sys
import types
import warnings

import pytest
import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from sklearn.exceptions import NotFittedError
from torch import nn
from torch.nn import functional as F

import poise
from poise.link import quadrature, smooth
from poise.model import CalibratedModel, Network, RerunWarning, split
from poise.neighbors import Additive, weak
from poise.noise import Gaussian, GeneralizedNormal, Laplace, LogGamma, Uniform
from poise.sampling import estimate


class Block(nn.Module):
    """A residual block: its inner layers cannot be cut at, its output can."""

    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return F.relu(x + F.dropout(self.conv2(self.relu(self.norm(self.conv1(x)))), 0.5, training=self.training))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.layer1 = nn.Sequential(Block(4), Block(4))
        self.layer2 = nn.Sequential(Block(4))
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(4, 5)

    def forward(self, images):
        x = self.layer1(self.stem(images))[:, :, ::2, ::2]
        return self.fc(self.drop(self.layer2(x).mean((2, 3))))


class Branching(Net):
    """What torch.fx cannot follow: the way depends on the values."""

    def forward(self, images):
        return super().forward(images) if images.sum() > -1e9 else images


class Tupled(nn.Module):
    """Layers as in transformers: a tuple out, and `.logits` at the end."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = nn.Linear(6, 6)

        def forward(self, x):
            return torch.tanh(self.dense(x)), "attention"

    def __init__(self):
        super().__init__()
        self.layer = self.Layer()
        self.classifier = nn.Linear(6, 5)

    def forward(self, inputs=None, *, scale=1.0):
        return types.SimpleNamespace(logits=self.classifier(self.layer(inputs * scale)[0]))


@pytest.fixture
def net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Net()
        for norm in net.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.running_mean.normal_()
                norm.running_var.uniform_(0.5, 2)
        for weight in net.parameters():
            weight.data.mul_(1.5)
    return net


@pytest.fixture
def images():
    return torch.rand(10, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def in_eval(net, images):
    with torch.no_grad():
        return Network(net)(images)


def quietly(*arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RerunWarning)
        return split(*arguments)


# Cutting


@pytest.mark.parametrize("layer", ["stem", "layer1", "layer1.0", "layer1.1", "layer2", "layer2.0", "drop", "fc"])
def test_head_after_body_is_the_network(net, images, layer):
    body, head = split(net, layer)
    activation = body(images)
    torch.testing.assert_close(head(activation), in_eval(net, images), rtol=0, atol=0)
    assert net.training, "the network was in training mode and still is"
    assert all(module.training for module in net.modules())
    if layer == "fc":
        return
    # The same weights, not a copy of them.
    net.fc.bias.data += 1
    torch.testing.assert_close(head(activation), in_eval(net, images), rtol=0, atol=0)


def test_only_what_is_above_is_computed_again(net, images):
    body, head = split(net, "layer1")
    activation = body(images)
    called = []
    for name, module in net.named_modules():
        module.register_forward_hook(lambda *_, name=name: called.append(name))
    head(activation)
    assert {"layer2.0.conv1", "fc"} <= set(called)
    assert not {name for name in called if name.startswith(("stem", "layer1"))}
    called.clear()
    body(images)
    assert not {name for name in called if name.startswith(("layer2", "fc"))}


@pytest.mark.parametrize(
    ("make", "layer", "reason"),
    [
        (Net, "layer1.0.conv1", "takes what comes from the input past it"),
        (Net, "layer1.0.relu", "takes what comes from the input past it"),
        (Branching, "layer2", "torch.fx cannot follow it"),
    ],
)
def test_where_it_cannot_be_cut_it_is_rerun(make, layer, reason, images):
    """The same numbers as a hook that adds the same noise, image by image."""
    torch.manual_seed(2)
    net = make()
    with pytest.warns(RerunWarning, match=reason):
        body, head = split(net, layer)
    with pytest.raises(ValueError, match=r"call body\(inputs\) first"):
        head(torch.zeros(1, 2))
    rows = body(images)
    torch.testing.assert_close(head(rows), in_eval(net, images), rtol=0, atol=0)

    drawn = []

    class Recorded(Additive):
        def draw(self, inputs, num_samples, generator):
            drawn.append(super().draw(inputs, num_samples, generator))
            return drawn[-1]

    shares = estimate(rows, neighbors=Recorded(Gaussian()), strength=3.0, head=head, num_samples=20)
    z = torch.cat(drawn)[:20, :10]
    votes = torch.zeros(10, 5)
    for t, row in [(t, row) for t in range(20) for row in range(10)]:
        noise = z[t, row]
        handle = net.get_submodule(layer).register_forward_hook(
            lambda _, __, out, noise=noise: out + 3 * noise.view(out.shape)
        )
        votes[row, in_eval(net, images[row : row + 1]).argmax()] += 1
        handle.remove()
    assert ((shares - votes / 20).abs() > 1e-6).float().mean() < 0.03, "but for a tie in the last digit"
    assert (shares.amax(1) < 1).any()


def test_a_rerun_gives_what_a_cut_gives(net, images, monkeypatch):
    how = {"neighbors": Additive(Gaussian()), "strength": 2.0, "num_samples": 30}
    body, head = split(net, "layer1")
    cut = estimate(body(images).flatten(1), head=lambda x: head(x.view(-1, 4, 8, 8)), **how)
    monkeypatch.setattr(sys.modules["poise.model.split"], "_cut", lambda *_: "it was asked for")
    body, head = quietly(net, "layer1")
    rerun = estimate(body(images), head=head, **how)
    assert (cut == rerun).float().mean() > 0.97
    assert (cut.amax(1) < 1).any()


def test_arguments_that_are_left_out():
    """A network that asks for a mask is cut as it runs without one."""

    class Masked(Net):
        def forward(self, images, mask=None, scale=2.0, *, extra=None):
            x = images * scale
            if mask is not None:
                x = x * mask
            x = self.stem(x)
            return super().forward(x[:, :3]) if extra is None else x

    torch.manual_seed(0)
    model, x = Masked(), torch.rand(4, 3, 8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        body, head = split(model, "layer1")
    torch.testing.assert_close(head(body(x)), in_eval(model, x), rtol=0, atol=0)
    torch.testing.assert_close(head(body(images=x)), in_eval(model, x), rtol=0, atol=0)


def test_a_layer_that_gives_a_tuple():
    torch.manual_seed(0)
    model, x = Tupled(), torch.randn(4, 6)
    body, head = quietly(model, "layer")
    torch.testing.assert_close(head(body(x)), model(x).logits)
    moved = body(x)
    moved[:, :6] += 1
    torch.testing.assert_close(head(moved), model.classifier(model.layer(x)[0] + 1))


def test_whole_numbers_survive_a_rerun():
    """Token numbers are carried along with the activation and come back as they were."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50_000, 3), Branch(), nn.Flatten(), nn.Linear(12, 2))
    tokens = torch.randint(50_000, (6, 4))
    body, head = quietly(model, "0")
    torch.testing.assert_close(head(body(tokens)), model(tokens))


def test_every_digit_survives_a_rerun():
    """In a network of halves, where a token's number or an image would be rounded, and for long numbers too."""
    torch.manual_seed(0)

    class Looked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.branch, self.last = nn.Linear(3, 4), Branch(), nn.Linear(4, 2)

        def forward(self, x, tokens=None, *, scale=1.0):
            x = self.branch(self.first(x.to(self.first.weight.dtype)))
            return self.last(x + scale * (tokens % 1000)[:, None].to(x.dtype))

    model = Looked().bfloat16()
    x, tokens = torch.rand(5, 3), torch.randint(2**40, (5,))
    body, head = quietly(model, "first")
    assert body(x, tokens).dtype == torch.float64
    assert body(x, tokens=tokens % 1000).dtype == torch.float32
    for some in (tokens, tokens % 1000):
        assert torch.equal(head(body(x, tokens=some, scale=2.0)), model(x, some, scale=2.0))


class Branch(nn.Module):
    def forward(self, x):
        return x if x.sum() > -1e9 else -x


def test_names_are_looked_up(net):
    with pytest.raises(ValueError, match=r"no layer 'layer3'; the nearest are 'layer\d', 'layer\d'"):
        split(net, "layer3")
    with pytest.raises(ValueError, match="no layer ''"):
        split(net, "")
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, but a function came"):
        split(in_eval, "layer1")


def test_a_layer_must_take_part_once(images):
    class Twice(Net):
        def __init__(self):
            super().__init__()
            self.unused = nn.ReLU()

        def forward(self, images):
            return super().forward(self.stem(images)[:, :3])

    body, _ = quietly(Twice(), "stem")
    with pytest.raises(ValueError, match="must take part once in a pass, but did 2 times"):
        body(images)
    body, _ = quietly(Twice(), "unused")
    with pytest.raises(ValueError, match="did 0 times"):
        body(images)


# A network with its calibrator


def answered(model, *inputs, seed=0, **named):
    """Labels that agree with the network more often than not."""
    generator = torch.Generator().manual_seed(seed)
    logits = Network(model)(*inputs, **named).detach()
    guesses = torch.randint(max(2, logits[0].numel()), (len(logits),), generator=generator)
    said = logits.argmax(1) if logits.ndim == 2 and logits.shape[1] > 1 else (logits.flatten() > 0).long()
    return torch.where(torch.rand(len(logits), generator=generator) < 0.6, said, guesses)


def batches(model, num_batches=4, size=40):
    generator = torch.Generator().manual_seed(0)
    parts = [torch.rand(size, 3, 8, 8, generator=generator) for _ in range(num_batches)]
    return [(part, answered(model, part, seed=seed)) for seed, part in enumerate(parts)]


def whole(model):
    parts = batches(model)
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


CALIBRATORS = {
    "temperature": poise.TemperatureScaling,
    "consistency": lambda: poise.ConsistencyCalibration(Gaussian()),
    "steep": lambda: poise.ConsistencyCalibration(GeneralizedNormal(8.0)),
    "kinked": lambda: poise.ConsistencyCalibration(Laplace()),
    "heavy": lambda: poise.ConsistencyCalibration(LogGamma(0.25)),
    "matrix": poise.StructuredMatrixScaling,
    "sampled": lambda: poise.SampledConsistency(num_samples=50),
}


@pytest.mark.parametrize("name", CALIBRATORS)
def test_it_answers_as_the_calibrator_does(net, images, name):
    inputs, labels = whole(net)
    calibrated = CalibratedModel(net, CALIBRATORS[name]()).fit(batches(net))
    by_hand = CALIBRATORS[name]().fit(in_eval(net, inputs), labels)
    logits = in_eval(net, images)
    for mode in (True, False):
        net.train(mode)
        with torch.no_grad():
            assert torch.equal(calibrated(images), by_hand.predict_proba(logits))
            assert torch.equal(calibrated.log_probs(images), by_hand.predict_log_proba(logits))
        assert net.training == mode
    assert calibrated.train() is calibrated
    assert not calibrated.training
    assert not net.training


@pytest.mark.parametrize("name", ["temperature", "steep", "kinked", "sampled"])
def test_what_was_learned_is_in_the_state(net, images, name):
    """Through torch.save and through safetensors, into a network of other weights."""
    calibrated = CalibratedModel(net, CALIBRATORS[name]()).fit(batches(net))
    expected = calibrated(images)
    file = io.BytesIO()
    torch.save(calibrated.state_dict(), file)
    file.seek(0)
    for state in (torch.load(file, weights_only=True), load_bytes(save_bytes(calibrated.state_dict()))):
        other = CalibratedModel(Net(), CALIBRATORS[name]())
        with pytest.raises(NotFittedError, match=r"call fit\(val_loader\) first"):
            other(images)
        other.load_state_dict(state)
        assert torch.equal(other(images), expected)
    # An unfitted one has a state too, which leaves another as it is.
    calibrated.load_state_dict(CalibratedModel(net, CALIBRATORS[name]()).state_dict())
    assert torch.equal(calibrated(images), expected)


CACHES = (smooth.tables, smooth.widest_gap, quadrature._edges, quadrature.gauss_legendre)


@pytest.mark.parametrize("name", ["temperature", "consistency", "steep", "kinked", "heavy", "map"])
def test_export(net, images, name):
    """For any number of images, in a process that has not computed anything before."""
    mapped = {"map": lambda: poise.ConsistencyCalibration(Gaussian(), scaling="vector")}
    state = CalibratedModel(net, (CALIBRATORS | mapped)[name]()).fit(batches(net)).state_dict()
    for cached in CACHES:
        cached.cache_clear()
    calibrated = CalibratedModel(Net())
    calibrated.load_state_dict(state)
    rows = torch.export.Dim("rows", min=1, max=1024)
    program = torch.export.export(calibrated, (images,), dynamic_shapes=({0: rows},))
    for some in (images[:1], images, torch.cat([images] * 3)):
        torch.testing.assert_close(program.module()(some), calibrated(some), rtol=1e-6, atol=1e-7)


ALONE = """
import sys, torch
sys.modules["poise"] = None
program = torch.export.load(sys.argv[1]).module()
images, expected = torch.load(sys.argv[2])
torch.testing.assert_close(program(images), expected, rtol=1e-6, atol=1e-7)
print("the same")
"""


@pytest.mark.parametrize("noise", [Gaussian(), Laplace()])
def test_an_exported_program_needs_no_poise(net, images, tmp_path, noise):
    """Right after the fit; read from a file by a process that has torch alone, on more images than it was made with."""
    for cached in CACHES:
        cached.cache_clear()
    calibrated = CalibratedModel(net, poise.ConsistencyCalibration(noise)).fit(batches(net))
    rows = torch.export.Dim("rows", min=1, max=1024)
    torch.export.save(
        torch.export.export(calibrated, (images,), dynamic_shapes=({0: rows},)), tmp_path / "calibrated.pt2"
    )
    more = torch.cat([images] * 2)
    torch.save((more, calibrated(more).detach()), tmp_path / "expected.pt")
    command = [sys.executable, "-c", ALONE, tmp_path / "calibrated.pt2", tmp_path / "expected.pt"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "the same\n"


def test_what_cannot_be_exported_says_so(net, images):
    calibrated = CalibratedModel(net, poise.ConsistencyCalibration(Uniform())).fit(batches(net))
    with pytest.raises(ValueError, match=r"uniform noise .* cannot be compiled or exported"):
        torch.export.export(calibrated, (images,))
    sampled = poise.SampledConsistency(num_samples=20, strengths=[1.0])
    for at in ("logits", "fc"):
        calibrated = CalibratedModel(net, sampled, at=at).fit(batches(net))
        with pytest.raises(ValueError, match="random draws cannot be compiled or exported"):
            torch.export.export(calibrated, (images,))
    calibrated = CalibratedModel(net, poise.TemperatureScaling()).fit(batches(net))
    net.train()
    with pytest.raises(ValueError, match=r"training mode; call eval\(\)"):
        torch.export.export(calibrated, (images,))


@pytest.mark.parametrize("at", ["layer2", "fc", "inputs", "layer1.0.conv1"])
def test_perturbed_elsewhere(net, images, at):
    inputs, labels = whole(net)
    neighbors = weak() if at == "inputs" else Additive(Gaussian())
    how = {"neighbors": neighbors, "num_samples": 20, "strengths": [0.1, 1.0]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RerunWarning)
        calibrated = CalibratedModel(net, poise.SampledConsistency(**how), at=at).fit(batches(net))
        body, head = (nn.Identity(), Network(net)) if at == "inputs" else split(net, at)
        by_hand = poise.SampledConsistency(head=head, **how).fit(body(inputs), labels)
        assert torch.equal(calibrated(images), by_hand.predict_proba(body(images)))
        assert calibrated.calibrator.head is None
        other = CalibratedModel(Net(), poise.SampledConsistency(), at=at)
    other.load_state_dict(calibrated.state_dict())
    assert torch.equal(other(images), calibrated(images))


def test_a_moved_network_takes_its_parts_along():
    """A buffer of its own is another tensor after the network has moved, here to another precision."""

    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 5)
            self.register_buffer("shift", torch.ones(4))

        def forward(self, x):
            return self.last(self.first(x) + self.shift)

    torch.manual_seed(0)
    model, x = Shifted(), torch.randn(60, 6)
    sampled = poise.SampledConsistency(num_samples=20, strengths=[0.5])
    calibrated = CalibratedModel(model, sampled, at="first").fit([(x, answered(model, x))])
    moved = calibrated.double()(x.double())
    assert moved.dtype == torch.float64
    assert moved.shape == (60, 5)


def test_the_state_does_not_say_where_parts_were_kept(net, images, tmp_path):
    store = poise.io.Folder(tmp_path / "parts")
    sampled = poise.SampledConsistency(num_samples=20, strengths=[1.0], store=store)
    calibrated = CalibratedModel(net, sampled, at="fc").fit(batches(net))
    assert len(store) > 1
    other = CalibratedModel(net, poise.SampledConsistency(), at="fc")
    other.load_state_dict(calibrated.state_dict())
    assert other.calibrator.store is None
    assert calibrated.calibrator.store is store
    assert torch.equal(other(images), calibrated(images))


def test_models_as_hugging_face_makes_them():
    """Keywords in, an object with `.logits` out, batches as mappings."""
    torch.manual_seed(0)
    model = Tupled()
    inputs = torch.randn(60, 6)
    batch = {"inputs": inputs, "scale": 2.0, "labels": answered(model, inputs, scale=2.0)}
    calibrated = CalibratedModel(model, poise.TemperatureScaling()).fit([batch])
    logits = model(batch["inputs"], scale=2.0).logits.detach()
    expected = poise.TemperatureScaling().fit(logits, batch["labels"]).predict_proba(logits)
    torch.testing.assert_close(calibrated(inputs=batch["inputs"], scale=2.0), expected)
    torch.testing.assert_close(calibrated(batch["inputs"], scale=2.0), expected)
    assert "labels" in batch

    class Mapped(nn.Linear):
        def forward(self, x):
            return {"logits": super().forward(x), "loss": None}

    assert Network(Mapped(6, 3))(batch["inputs"]).shape == (60, 3)


class Texts(nn.Module):
    """As a text model: token numbers and a mask by keyword, and what torch.fx cannot follow."""

    def __init__(self):
        super().__init__()
        self.embedding, self.branch, self.classifier = nn.Embedding(20, 6), Branch(), nn.Linear(6, 5)

    def forward(self, input_ids=None, attention_mask=None):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        x = (self.branch(self.embedding(input_ids)) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return types.SimpleNamespace(logits=self.classifier(x))


def test_a_layer_of_a_model_that_takes_keywords():
    """The mask of each row stays with it, whatever the batches."""
    torch.manual_seed(0)
    model = Texts()
    ids, mask = torch.randint(20, (60, 7)), torch.ones(60, 7, dtype=torch.long)
    mask[::2, 3:] = 0
    whole = {"input_ids": ids, "attention_mask": mask}
    labels = answered(model, **whole)
    loader = [
        {name: one[rows : rows + 20] for name, one in whole.items()} | {"labels": labels[rows : rows + 20]}
        for rows in (0, 20, 40)
    ]
    how = {"num_samples": 40, "strengths": [0.3, 1.0]}
    with pytest.warns(RerunWarning):
        calibrated = CalibratedModel(model, poise.SampledConsistency(**how), at="classifier").fit(loader)
    # Noise behind the last layer is noise on the logits; the rows have the mask besides.
    at_logits = CalibratedModel(model, poise.SampledConsistency(**how)).fit(loader)
    assert calibrated.calibrator.strength_ == at_logits.calibrator.strength_
    assert torch.equal(calibrated(**whole), at_logits(**whole))
    assert not torch.equal(calibrated(**whole), calibrated(input_ids=ids)), "the mask counts"
    shorter = {name: one[:, :5] for name, one in loader[0].items() if name != "labels"} | {"labels": labels[:20]}
    with pytest.raises(ValueError, match=r"but those of shape \(15,\) and \(19,\) came; pad all inputs"):
        calibrated.fit([*loader, shorter])


def test_images_by_keyword(net, images):
    """As image models of transformers take them: the draws are those of images given by place."""

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, pixel_values=None, labels=None):
            return {"logits": self.net(pixel_values)}

    how = {"neighbors": weak(), "num_samples": 20}
    by_place = CalibratedModel(net, poise.SampledConsistency(**how), at="inputs").fit(batches(net))
    loader = [{"pixel_values": x, "labels": y} for x, y in batches(net)]
    wrapped = CalibratedModel(Wrapped(), poise.SampledConsistency(**how), at="inputs").fit(loader)
    for answer in (wrapped(pixel_values=images), wrapped(images)):
        assert torch.equal(answer, by_place(images))
    with pytest.raises(TypeError, match='one input is perturbed where at is "inputs", but Tensor, mask came'):
        wrapped(images, mask=images)


def of_transformers(kind):
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    if kind == "ViT":
        config = transformers.ViTConfig(**small, image_size=8, patch_size=4, num_labels=5)
        return transformers.ViTForImageClassification(config), ["pixel_values"], "vit.layernorm"
    config = transformers.BertConfig(**small, vocab_size=50, num_labels=5)
    return transformers.BertForSequenceClassification(config), ["input_ids", "attention_mask"], "bert.pooler"


def of_timm():
    timm = pytest.importorskip("timm")
    return timm.create_model("resnet10t", num_classes=5), [], "layer3"


def of_torchvision():
    models = pytest.importorskip("torchvision.models", exc_type=ImportError)
    return models.resnet18(num_classes=5), [], "layer3"


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "make",
    [lambda: of_transformers("ViT"), lambda: of_transformers("BERT"), of_timm, of_torchvision],
    ids=["image", "text", "timm", "torchvision"],
)
def test_models_of_the_libraries(make):
    """The whole way where they are installed: fit, answer, state, export, and a layer."""
    torch.manual_seed(0)
    model, keywords, layer = make()
    if "input_ids" in keywords:
        whole = {"input_ids": torch.randint(1, 50, (120, 6)), "attention_mask": torch.ones(120, 6, dtype=torch.long)}
        whole["attention_mask"][::2, 4:] = 0
    else:
        size = 8 if keywords else 32
        whole = {name: torch.rand(120, 3, size, size) for name in keywords or ["images"]}

    def given(rows):
        some = {name: one[rows] for name, one in whole.items()}
        return ((), some) if keywords else ((some["images"],), {})

    positional, named = given(slice(None))
    labels = answered(model, *positional, **named)
    loader = [
        given(rows)[1] | {"labels": labels[rows]} if keywords else (given(rows)[0][0], labels[rows])
        for rows in (slice(0, 60), slice(60, 120))
    ]
    calibrated = CalibratedModel(model).fit(loader)
    with torch.no_grad():
        logits = Network(model)(*positional, **named)
        answer = calibrated(*positional, **named)
    expected = poise.ConsistencyCalibration().fit(logits, labels).predict_proba(logits)
    torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-5)
    other = CalibratedModel(make()[0])
    other.load_state_dict(load_bytes(save_bytes(calibrated.state_dict())))
    with torch.no_grad():
        assert torch.equal(other(*positional, **named), answer)
    program = torch.export.export(calibrated, *given(slice(0, 60))).module()
    positional, named = given(slice(60, 120))
    torch.testing.assert_close(program(*positional, **named), calibrated(*positional, **named), rtol=1e-5, atol=1e-6)
    sampled = poise.SampledConsistency(num_samples=10, strengths=[0.1, 1.0])
    shares = CalibratedModel(model, sampled, at=layer).fit(loader)(*positional, **named)
    torch.testing.assert_close((10 * shares).round(), 10 * shares, rtol=0, atol=1e-4)


def test_one_log_odds_is_two_classes():
    torch.manual_seed(0)
    x = torch.randn(80, 6)
    for model in (nn.Linear(6, 1), nn.Sequential(nn.Linear(6, 1), nn.Flatten(0))):
        probs = CalibratedModel(model, poise.TemperatureScaling()).fit([(x, answered(model, x))])(x[:4])
        assert probs.shape == (4, 2)
        torch.testing.assert_close(probs.sum(1), torch.ones(4))


def test_halves_stay_halves(images):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 5))
    data = [(x.bfloat16(), y) for x, y in batches(model.float())]
    assert CalibratedModel(model.bfloat16()).fit(data)(images.bfloat16()).dtype == torch.bfloat16


def test_progress_counts_batches(net):
    seen = []
    CalibratedModel(net, poise.TemperatureScaling()).fit(batches(net), progress=lambda *at: seen.append(at))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_wrong_use_is_refused(net, images):
    sampled, layer2 = poise.SampledConsistency, {"at": "layer2"}
    for error, match, make in [
        (TypeError, "a torch.nn.Module was expected, but a function came", lambda: CalibratedModel(in_eval)),
        (TypeError, "a calibrator of poise was expected, but a str came", lambda: CalibratedModel(net, "ts")),
        (ValueError, "calibrates logits, but at is 'layer2'", lambda: CalibratedModel(net, **layer2)),
        (ValueError, "no layer 'layer5'", lambda: CalibratedModel(net, sampled(), at="layer5")),
        (ValueError, "no layer 'pool'", lambda: CalibratedModel(net, features="pool")),
        (ValueError, 'pass at="inputs"', lambda: CalibratedModel(net, sampled(weak()))),
        (ValueError, "came with one; leave it out", lambda: CalibratedModel(net, sampled(head=net.fc), **layer2)),
        (ValueError, "the loader gave no batch", lambda: CalibratedModel(net).fit([])),
        (TypeError, "but a Tensor came; let the loader give pairs", lambda: CalibratedModel(net).fit([images])),
        (TypeError, "but a mapping with 'x' came", lambda: CalibratedModel(net).fit([{"x": images}])),
        (TypeError, "but gave a tuple", lambda: Network(Tupled.Layer())(torch.zeros(2, 6))),
    ]:
        with pytest.raises(error, match=match):
            make()


def test_features_of_a_layer(net, images):
    """For the methods that need them: the layer's output of the same pass, flat."""

    class Spy(poise.TemperatureScaling):
        needs_features = True

        def _fit(self, logits, labels, weight, features):
            super()._fit(logits, labels, weight, features)
            self.seen_ = features

        def _log_prob(self, logits, features):
            self.seen_ = features
            return super()._log_prob(logits, features)

    calibrated = CalibratedModel(net, Spy(), features="layer2").fit(batches(net))
    body, _ = split(net, "layer2")
    torch.testing.assert_close(calibrated.calibrator.seen_, body(whole(net)[0]).flatten(1).detach())
    calibrated(images)
    torch.testing.assert_close(calibrated.calibrator.seen_, body(images).flatten(1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_on_a_device(net, images):
    calibrated = CalibratedModel(net, poise.ConsistencyCalibration()).fit(batches(net))
    expected = calibrated(images)
    on_device = calibrated.cuda()(images)
    assert on_device.is_cuda
    torch.testing.assert_close(on_device.cpu(), expected, rtol=1e-3, atol=1e-4)
