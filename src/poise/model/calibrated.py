"""A network whose probabilities are true: an nn.Module in, an nn.Module out."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self

import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from poise import _arrays, _check, io
from poise._types import Logits, Probs
from poise.calibrators import ConsistencyCalibration, SampledConsistency
from poise.calibrators.base import Calibrator
from poise.model.network import Network, evaluating, first_tensor, hooked, logits_of
from poise.model.split import split
from poise.neighbors import Augmented, TrainAugmentation
from poise.noise import Uniform
from poise.progress import Progress


class CalibratedModel(nn.Module):
    """A network with its calibrator: once ``fit(val_loader)`` has run, the output is probabilities.

    The network may give a tensor of logits or anything with `.logits`, take tensors or keywords, as in
    ``calibrated(**batch)``, and stay on any device; it is put into eval mode. A `SampledConsistency`
    may perturb elsewhere than at the logits: at="inputs", or at="layer4", any layer's name. What was learned is part of
    the `state_dict`. At the logits, `torch.export` takes it with any exact method, unless the noise is uniform.

    >>> _ = torch.manual_seed(0)
    >>> network, x = torch.nn.Linear(4, 3), torch.randn(200, 4)
    >>> labels = (network(x) + torch.randn(200, 3)).argmax(1)
    >>> calibrated = CalibratedModel(network).fit(zip(x.split(50), labels.split(50)))
    >>> probs = calibrated(torch.randn(5, 4))
    >>> probs.shape, bool(torch.allclose(probs.sum(1), torch.ones(5)))
    (torch.Size([5, 3]), True)

    Args:
        calibrator: any of poise's, fitted or not; `ConsistencyCalibration()` where it is left out.
        at: where a `SampledConsistency` perturbs: "logits", "inputs", or the name of a layer.
        features: the layer whose output is the features, for the methods that need them.
    """

    _parts: tuple[nn.Module, nn.Module] | None

    def __init__(
        self,
        model: nn.Module,
        calibrator: Calibrator | None = None,
        *,
        at: str = "logits",
        features: str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"a torch.nn.Module was expected, but a {type(model).__name__} came; pass the network.")
        calibrator = ConsistencyCalibration() if calibrator is None else calibrator
        if not isinstance(calibrator, Calibrator):
            raise TypeError(
                f"a calibrator of poise was expected, but a {type(calibrator).__name__} came; pass "
                "ConsistencyCalibration(), or leave it out."
            )
        self.model = model
        self.at = at
        self.features = features
        # Not registered: the parts are the network's own modules, whose weights the state holds once.
        object.__setattr__(self, "_parts", self._cut(calibrator))
        if features is not None:
            _check.layer(features, dict(model.named_modules()))
        self.calibrator = calibrator
        self._make_tables()
        self.eval()

    def _cut(self, calibrator: Calibrator) -> tuple[nn.Module, nn.Module] | None:
        """Body and head of the network where something else than logits is perturbed."""
        if self.at != "logits" and not isinstance(calibrator, SampledConsistency):
            raise ValueError(
                f"{type(calibrator).__name__} calibrates logits, but at is {self.at!r}; leave it out, or pass a "
                "SampledConsistency, which perturbs anything."
            )
        if isinstance(calibrator, SampledConsistency):
            if calibrator.head is not None:
                raise ValueError(
                    "the head is cut from the network here, but the calibrator came with one; leave it out and name "
                    'the layer: at="layer4".'
                )
            kinds = calibrator.neighbors if isinstance(calibrator.neighbors, (list, tuple)) else [calibrator.neighbors]
            if self.at != "inputs" and any(isinstance(one, (Augmented, TrainAugmentation)) for one in kinds):
                raise ValueError(f'augmentations change images, but at is {self.at!r}; pass at="inputs".')
        if self.at == "logits":
            return None
        if self.at == "inputs":
            body = _Inputs()
            return body, _FromInputs(self.model, body)
        return split(self.model, self.at)

    def fit(self, loader: Iterable[Any], *, classes: Any = None, progress: Progress | None = None) -> Self:
        """Learns from batches of (inputs, labels), or of mappings with "labels" and the network's keywords.

        The network passes over them once, on its own device; what the calibrator needs of them is kept. `progress` is
        called with the number of batches done and, where the loader tells its length, to do.
        """
        tables: list[tuple[Tensor, Tensor | None]] = []
        labels = []
        total = len(loader) if isinstance(loader, Sized) else 0
        with torch.no_grad():
            for number, batch in enumerate(loader, start=1):
                inputs, named, truth = _batch(batch)
                table, own = self._table(inputs, named)
                # Logits are small; images and activations go back to the device a tile at a time.
                tables.append((table if self._parts is None else table.cpu(), own))
                labels.append(_arrays.to_tensor(truth).cpu())
                if progress is not None:
                    progress(number, max(number, total))
        if not tables:
            raise ValueError("there is nothing to fit on: the loader gave no batch; pass batches of (inputs, labels).")
        shapes = sorted({tuple(table.shape[1:]) for table, _ in tables})
        if len(shapes) > 1:
            raise ValueError(
                f"the rows of all batches must have the same shape where at is {self.at!r}, but those of shape "
                f"{' and '.join(map(str, shapes))} came; pad all inputs to one length."
            )
        features = [own for _, own in tables if own is not None]
        fitted = self._estimator().fit(
            torch.cat([table for table, _ in tables]),
            torch.cat(labels),
            features=torch.cat(features) if features else None,
            classes=classes,
        )
        self.calibrator = _without_head(fitted)
        self._make_tables()
        return self

    def forward(self, inputs: Any = None, **named: Any) -> Probs:
        """Probabilities (n, k)."""
        return self._answer("_prob", inputs, named)

    def log_probs(self, inputs: Any = None, **named: Any) -> Logits:
        """Log-probabilities (n, k), exact where a probability would round to zero."""
        return self._answer("_log_prob", inputs, named)

    def train(self, mode: bool = True) -> Self:
        """Stays in eval mode: what was calibrated is the network as it answers then."""
        return super().train(False)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Buffers are replaced when a module moves, and the parts would keep the old ones.
        object.__setattr__(self, "_parts", self._cut(self.calibrator))
        return self

    def _answer(self, method: str, inputs: Any, named: Mapping[str, Any]) -> Tensor:
        check_is_fitted(self.calibrator, msg="this CalibratedModel has not learned yet; call fit(val_loader) first.")
        if torch.compiler.is_compiling() and isinstance(self.calibrator, SampledConsistency):
            raise ValueError(
                "random draws cannot be compiled or exported; fit ConsistencyCalibration(), the exact vote at the "
                "logits, or compile the network before it is wrapped."
            )
        table, features = self._table(inputs, named)
        # Without the checks of predict_proba, which look at values and could not be exported.
        answer = getattr(self._estimator(), method)(_arrays.to_floating(table), features)
        return answer.to(table.dtype) if table.is_floating_point() else answer  # type: ignore[no-any-return]

    def _table(self, inputs: Any, named: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
        """What the calibrator takes, logits as it were, and the features."""
        device = next((parameter.device for parameter in self.model.parameters()), None)
        positional = () if inputs is None else (_moved(inputs, device),)
        named = {name: _moved(one, device) for name, one in named.items()}
        if self._parts is not None:
            # Votes have no gradient.
            with torch.no_grad():
                return self._parts[0](*positional, **named), None
        found: list[Tensor] = []

        def keep(module: nn.Module, given: Any, output: Any) -> None:
            found.append(first_tensor(output, str(self.features)).flatten(1))

        watching = nullcontext() if self.features is None else hooked(self.model, self.features, keep)
        with self._evaluating(), watching:
            logits = logits_of(self.model(*positional, **named))
        if logits.ndim == 1 or logits.shape[1] == 1:
            log_odds = logits.reshape(-1, 1)
            logits = torch.cat([torch.zeros_like(log_odds), log_odds], dim=1)
        return logits, found[-1] if found else None

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        if not torch.compiler.is_compiling():
            with evaluating(self.model):
                yield
            return
        # Modules cannot be changed while a program is traced, and it would keep the dropout of training.
        if any(module.training for module in self.model.modules()):
            raise ValueError("the network is in training mode; call eval() before it is compiled or exported.")
        if isinstance(getattr(self.calibrator, "noise_", None), Uniform):
            raise ValueError(
                "the exact vote under uniform noise looks at the values and cannot be compiled or exported; fit "
                "ConsistencyCalibration() with another noise, such as GeneralizedNormal(8.0)."
            )
        yield

    def _estimator(self) -> Calibrator:
        if self._parts is None:
            return self.calibrator
        estimator: Calibrator = copy.copy(self.calibrator)
        return estimator.set_params(head=self._parts[1])  # type: ignore[no-any-return]

    def get_extra_state(self) -> Tensor:
        """The fitted calibrator as the bytes of its file: a tensor, so that safetensors keep it too."""
        if not hasattr(self.calibrator, "classes_"):
            return torch.zeros(0, dtype=torch.uint8)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "calibrator.safetensors"
            # Where parts are kept is of this machine.
            kept = copy.copy(self.calibrator)
            io.save(kept.set_params(store=None) if isinstance(kept, SampledConsistency) else kept, file)
            return torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Puts the calibrator of a `state_dict` in the place of this one."""
        if len(state) == 0:
            return
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "calibrator.safetensors"
            file.write_bytes(state.cpu().numpy().tobytes())
            self.calibrator = io.load(file)
        self._make_tables()

    def _make_tables(self) -> None:
        """What the exact vote computes once for a noise, and could not while it is exported."""
        if isinstance(self.calibrator, ConsistencyCalibration) and hasattr(self.calibrator, "classes_"):
            # As with a gradient, for what is compiled for the CPU is not what is exported.
            self.calibrator.predict_log_proba(torch.zeros(1, len(self.calibrator.classes_), requires_grad=True))


class _Inputs(nn.Module):
    """The one input that is perturbed, given by place or by keyword."""

    keyword: str | None = None

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        if len(inputs) + len(named) != 1:
            came = ", ".join([*(type(one).__name__ for one in inputs), *named]) or "none"
            raise TypeError(
                f'one input is perturbed where at is "inputs", but {came} came; pass the images alone, or perturb a '
                "layer by its name."
            )
        self.keyword, value = (None, inputs[0]) if inputs else next(iter(named.items()))
        return value  # type: ignore[no-any-return]


class _FromInputs(Network):
    """The network, called as its input was given last."""

    def __init__(self, module: nn.Module, inputs: _Inputs) -> None:
        super().__init__(module)
        self.inputs = inputs

    def forward(self, inputs: Tensor) -> Logits:
        keyword = self.inputs.keyword
        return super().forward(inputs) if keyword is None else super().forward(**{keyword: inputs})


def _without_head(calibrator: Calibrator) -> Calibrator:
    return calibrator.set_params(head=None) if isinstance(calibrator, SampledConsistency) else calibrator


def _moved(value: Any, device: torch.device | None) -> Any:
    return value.to(device) if isinstance(value, Tensor) and device is not None else value


def _batch(batch: Any) -> tuple[Any, dict[str, Any], Any]:
    """The input, named inputs and labels of one batch."""
    if isinstance(batch, Mapping):
        named = dict(batch)
        for name in ("labels", "label"):
            if name in named:
                truth = named.pop(name)
                return None, named, truth
    elif isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], {}, batch[1]
    came = (
        f"a mapping with {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
    )
    raise TypeError(
        f'a batch must be (inputs, labels), or a mapping with "labels", but {came} came; let the loader give pairs.'
    )
