"""Linear layers with weights laid out for oneDNN: verifying a block on a CPU in about half the time.

A block of 1 + K tokens is too few rows for the matrix product that torch takes by default: it reads the weights in
their plain layout at well below the speed of the memory. oneDNN keeps weights in blocks of its own and computes a few
rows at the speed at which they are read. Laying them out takes as much memory again as the layers themselves and
about the time of reading the model, so it is done once, for as long as a ``with`` block lasts, and never silently.

Sums are taken in another order: results are equal up to rounding, for plain and speculative decoding alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from dflash2_train.config import ConfigError


def can_pack(*models: nn.Module) -> bool:
    """Whether torch has oneDNN here, and all weights lie on the CPU in a dtype that it computes in."""
    parameters = [parameter for model in models for parameter in model.parameters()]
    return torch.backends.mkldnn.is_available() and all(
        parameter.device.type == "cpu" and parameter.dtype in (torch.float32, torch.bfloat16)
        for parameter in parameters
    )


@contextmanager
def packed_linears(*models: nn.Module) -> Iterator[None]:
    """Compute the linear layers of ``models`` from packed copies of their weights while the context is open.

    The weights must not change in the meantime. Forward passes only: no gradient flows through a packed layer.

    Raises:
        ConfigError: :func:`can_pack` says no.
    """
    if not can_pack(*models):
        raise ConfigError(
            "packed_linears: weights on the CPU in float32 or bfloat16 and a torch build with oneDNN are needed. "
            "Decode without it."
        )
    with ExitStack() as stack:
        for module in _linears(models):
            module.__dict__["forward"] = _packed_forward(module)  # before the class's, as accelerate does it
            stack.callback(module.__dict__.pop, "forward")
        yield


def _linears(models: tuple[nn.Module, ...]) -> Iterator[nn.Linear]:
    """Every plain linear layer once; subclasses and already replaced forwards stay as they are."""
    seen: set[int] = set()
    for model in models:
        for module in model.modules():
            if type(module) is nn.Linear and id(module) not in seen and "forward" not in module.__dict__:
                seen.add(id(module))
                yield module


def _packed_forward(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
    bias, multiply = linear.bias, torch.ops.mkldnn._linear_pointwise

    def forward(hidden: Tensor) -> Tensor:
        product: Tensor = multiply(hidden, packed, bias, "none", [], "")
        return product

    return forward
