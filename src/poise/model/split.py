"""A network cut at any layer: what is below it, and what is above, which a perturbation has to pass."""

from __future__ import annotations

import functools
import inspect
import operator
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from poise import _check
from poise._types import Logits
from poise.model.network import Network, evaluating, first_tensor, hooked, logits_of


class RerunWarning(UserWarning):
    """A network could not be cut at the layer, so that every neighbour passes the whole of it."""


class Split(NamedTuple):
    """The two parts of a network: head(body(inputs)) are its logits."""

    body: nn.Module
    """Inputs to what is perturbed, (n, ...)."""
    head: nn.Module
    """What is perturbed to logits, (n, k)."""


def split(model: nn.Module, layer: str) -> Split:
    """(body, head) of a network: up to the output of one of its layers, and from there to the logits.

    ``body, head = split(model, "layer4")``, then ``SampledConsistency(Additive(Gaussian()), head)`` is fitted on
    ``body(images)``. The parts share the network's weights and run in eval mode.

    Where torch.fx can follow the network and nothing skips across the cut, the head is only what is above it.
    Otherwise, which a `RerunWarning` says, the head reruns the whole network with a hook that puts the perturbed
    activation in its place: the same numbers, at the cost of a full pass for every neighbour. Then ``body(inputs)``
    has a row for every input, the activation and behind it the input itself, of which only the first is perturbed.
    The body takes what the network takes, keywords too: ``body(input_ids=..., attention_mask=...)``.

    >>> network = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    >>> body, head = split(network, "1")
    >>> x = torch.randn(5, 4)
    >>> body(x).shape, torch.equal(head(body(x)), network(x))
    (torch.Size([5, 3]), True)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"split takes a torch.nn.Module, but a {type(model).__name__} came; pass the network itself.")
    _check.layer(layer, dict(model.named_modules()))
    parts = _cut(model, layer)
    if isinstance(parts, Split):
        return parts
    warnings.warn(
        f"every neighbour will pass the whole network, for it cannot be cut at {layer!r}: {parts}; the numbers are the "
        "same, but a perturbation costs as much as one of the input.",
        RerunWarning,
        stacklevel=2,
    )
    body = _BodyOfRerun(model, layer)
    return Split(body, _HeadOfRerun(body))


class _Tracer(fx.Tracer):
    """Sees the layer as one step, whatever is in it."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        self.layer = layer

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name == self.layer or super().is_leaf_module(m, module_qualified_name)


def _cut(model: nn.Module, layer: str) -> Split | str:
    """The parts by torch.fx, or the reason why not."""
    try:
        # In eval mode, for what a functional dropout is told is written into the graph.
        with evaluating(model):
            graph = _Tracer(layer).trace(model, _left_out(model))
    # Whatever a network does that cannot be followed symbolically ends in an error of its own kind.
    except Exception as error:
        return f"torch.fx cannot follow it ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
    places = [node for node in graph.nodes if node.op == "call_module" and node.target == layer]
    if len(places) != 1:
        return f"it is called {len(places)} times by name"
    place = places[0]
    # A slice is taken of a tensor, a number of what may be a tuple.
    if any(user.target is operator.getitem and isinstance(user.args[1], int) for user in place.users):
        return "its output may not be one tensor"
    above: set[fx.Node] = set()
    pending = [node for node in graph.nodes if node.op == "output"]
    while pending:
        node = pending.pop()
        if node.op == "placeholder":
            user = next((str(one) for one in node.users if one in above), "the output")
            return f"{user!r} takes what comes from the input past it"
        if node not in above and node is not place:
            above.add(node)
            pending += node.all_input_nodes
    return Split(_Body(_below(model, graph, place)), Network(_above(model, graph, place, above)))


def _left_out(model: nn.Module) -> dict[str, Any]:
    """Arguments that are not given: a network that asks whether one is None must be told so."""
    parameters = inspect.signature(model.forward).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not one.empty}


def _below(model: nn.Module, graph: fx.Graph, place: fx.Node) -> fx.GraphModule:
    below = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copies[node] = below.node_copy(node, lambda one: copies[one])
        if node is place:
            break
    below.output(copies[place])
    module = fx.GraphModule(model, below)
    # Placeholders stay, whatever else is not needed goes.
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _above(model: nn.Module, graph: fx.Graph, place: fx.Node, nodes: set[fx.Node]) -> fx.GraphModule:
    above = fx.Graph()
    copies = {place: above.placeholder("activation")}
    for node in graph.nodes:
        if node in nodes:
            copies[node] = above.node_copy(node, lambda one: copies[one])
    return fx.GraphModule(model, above)


class _Body(nn.Module):
    """The lower part, in eval mode."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        with evaluating(self.module):
            activation = self.module(*inputs, **named)
        if not isinstance(activation, Tensor):
            raise TypeError(
                f"a layer must give one tensor, but gives a {type(activation).__name__}; name one inside or after it."
            )
        return activation


class _BodyOfRerun(nn.Module):
    """Rows that hold the activation and the inputs, all flat."""

    def __init__(self, model: nn.Module, layer: str) -> None:
        super().__init__()
        self.model, self.layer = model, layer
        self.activation: _Part | None = None
        # By place or by keyword, as the network was last called: what each row has of its own, and what all share.
        self.carried: dict[Any, _Part] = {}
        self.shared: dict[Any, Any] = {}

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        found: list[Tensor] = []

        def keep(module: nn.Module, given: Any, output: Any) -> None:
            found.append(first_tensor(output, self.layer))

        with evaluating(self.model), hooked(self.model, self.layer, keep):
            self.model(*inputs, **named)
        if len(found) != 1:
            raise ValueError(
                f"layer {self.layer!r} must take part once in a pass, but did {len(found)} times; name another layer."
            )
        activation = found[0]
        arguments: dict[Any, Any] = {**dict(enumerate(inputs)), **named}
        own = {
            key: one
            for key, one in arguments.items()
            if isinstance(one, Tensor) and one.ndim > 0 and len(one) == len(activation)
        }
        self.activation = _Part.of(activation)
        self.carried = {key: _Part.of(one) for key, one in own.items()}
        self.shared = {key: one for key, one in arguments.items() if key not in own}
        parts = [activation, *own.values()]
        dtype = functools.reduce(torch.promote_types, [_holding(one) for one in parts])
        return torch.cat([one.reshape(len(one), one.shape[1:].numel()).to(dtype) for one in parts], dim=1)


class _HeadOfRerun(nn.Module):
    """The whole network from such rows, with the activation in its place."""

    def __init__(self, body: _BodyOfRerun) -> None:
        super().__init__()
        self.body = body

    @property
    def num_perturbed(self) -> int:
        """How many numbers of a row are perturbed; the rest is carried along."""
        return self._activation.shape.numel()

    @property
    def _activation(self) -> _Part:
        if self.body.activation is None:
            raise ValueError("the head takes what the body gave, but the body has not run; call body(inputs) first.")
        return self.body.activation

    def forward(self, rows: Tensor) -> Logits:
        body, parts = self.body, [self._activation, *self.body.carried.values()]
        flat = torch.split(rows, [part.shape.numel() for part in parts], dim=1)
        activation, *own = [part.again(some) for part, some in zip(parts, flat, strict=True)]
        arguments: dict[Any, Any] = body.shared | dict(zip(body.carried, own, strict=True))
        positional = [arguments.pop(key) for key in sorted(key for key in arguments if isinstance(key, int))]

        def put(module: nn.Module, given: Any, output: Any) -> Any:
            return activation if isinstance(output, Tensor) else (activation, *output[1:])

        with evaluating(body.model), hooked(body.model, body.layer, put):
            return logits_of(body.model(*positional, **arguments))


class _Part(NamedTuple):
    """What a row of a tensor was before it became part of a longer one."""

    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _Part:
        return cls(tensor.shape[1:], tensor.dtype)

    def again(self, rows: Tensor) -> Tensor:
        return rows.reshape(-1, *self.shape).to(self.dtype)


def _holding(tensor: Tensor) -> torch.dtype:
    """The smallest floating type that keeps every digit."""
    if tensor.is_floating_point():
        return tensor.dtype
    return torch.float32 if torch.equal(tensor.float().to(tensor.dtype), tensor) else torch.float64
