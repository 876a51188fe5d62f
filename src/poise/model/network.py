"""Any network as a function from inputs to logits, and what happens at one of its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from poise._types import Logits


class Network(nn.Module):
    """A network as a function from inputs to logits (n, k), run in eval mode whatever mode it was left in.

    Its output is a tensor, or has `.logits` (or ["logits"]) as the outputs of Hugging Face models do.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **named: Any) -> Logits:
        with evaluating(self.module):
            return logits_of(self.module(*inputs, **named))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode for a while; afterwards every module is in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def logits_of(output: Any) -> Logits:
    """The logits in what a network gives: a tensor, or what has `.logits` or ["logits"]."""
    found = output
    if not isinstance(found, Tensor):
        found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if not isinstance(found, Tensor):
        raise TypeError(
            f"a network must give a tensor of logits, or an object with .logits, but gave a {type(output).__name__}; "
            "wrap it in a module that returns its logits."
        )
    return found


@contextmanager
def hooked(model: nn.Module, layer: str, hook: Callable[[nn.Module, Any, Any], Any]) -> Iterator[None]:
    handle = model.get_submodule(layer).register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def first_tensor(output: Any, layer: str) -> Tensor:
    first = output[0] if isinstance(output, tuple) and output else output
    if not isinstance(first, Tensor):
        raise TypeError(
            f"layer {layer!r} must give a tensor, or a tuple that begins with one, but gives a {type(first).__name__}; "
            "name another layer."
        )
    return first
