"""Buffers that a checkpoint does not hold: checked against a freshly built module after loading.

transformers 5 builds a model without memory and fills only what the checkpoint has. For classes that bring
their own weight initialisation, buffers registered with `persistent=False` (rotary frequencies, masks) then
come back as whatever the memory held, and nothing is raised.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from loopq.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor, nn


def unsaved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Name to buffer, of those that `state_dict` leaves out."""
    return {
        f"{prefix}.{name}".lstrip("."): buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name in module._non_persistent_buffers_set
    }


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Build modules inside the block with real buffers but parameters that take no memory."""
    from torch import nn  # lazy: loopq imports without torch

    plain = nn.Module.register_parameter

    def register(module: Any, name: str, parameter: Any) -> None:
        plain(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            module._parameters[name] = nn.Parameter(
                parameter.data.to("meta"), requires_grad=parameter.requires_grad
            )

    nn.Module.register_parameter = register
    try:
        yield
    finally:
        nn.Module.register_parameter = plain


def fresh_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Build the model's class once more from its configuration and return the unsaved buffers.

    Raises
    ------
    CheckpointError
        The class cannot be built, so that nothing can be checked.
    """
    import torch  # lazy: loopq imports without torch

    def make() -> Any:
        return type(model)(copy.deepcopy(model.config))

    with torch.random.fork_rng(devices=[]):
        # A constructor that computes with its parameters needs real ones: then it is tried once more.
        with contextlib.suppress(Exception), without_weights():
            return unsaved_buffers(make())
        try:
            return unsaved_buffers(make())
        except Exception as cause:
            raise CheckpointError(
                f"{type(model).__name__} cannot be built again from its configuration ({cause}), so its buffers "
                "that are not in the checkpoint cannot be checked; load the model with another version of "
                "transformers"
            ) from cause


def repair_buffers(
    model: nn.Module, build: Callable[[nn.Module], dict[str, Tensor]] = fresh_buffers
) -> tuple[str, ...]:
    """Compare every unsaved buffer with a freshly built one and set those right that differ.

    Parameters
    ----------
    model : nn.Module
        A model as its loader left it.
    build : callable
        Gives the buffers as they should be.

    Returns
    -------
    tuple of str
        Names of the buffers that were set right.

    Raises
    ------
    CheckpointError
        A buffer cannot be told: a new one is random or not finite, or has another shape.
    """
    import torch  # lazy: loopq imports without torch

    loaded = unsaved_buffers(model)
    if not loaded:
        return ()
    fresh = build(model)
    wrong = [name for name, value in loaded.items() if not _same(value, fresh.get(name))]
    if not wrong:
        return ()
    again = build(model)
    for name in wrong:
        value, target = fresh.get(name), loaded[name]
        if value is None or value.shape != target.shape:
            raise CheckpointError(f"buffer {name}: a freshly built model has another shape or no such buffer")
        if not torch.equal(value, again[name]):
            raise CheckpointError(f"buffer {name}: not in the checkpoint and not the same in two new models")
        if value.is_floating_point() and bool(value.isnan().any()):
            raise CheckpointError(f"buffer {name}: NaN in a freshly built model too")
        prefix, _, last = name.rpartition(".")
        device = next(model.parameters()).device if target.is_meta else target.device
        model.get_submodule(prefix)._buffers[last] = value.to(device, target.dtype)
    return tuple(wrong)


def _same(loaded: Tensor, fresh: Tensor | None) -> bool:
    import torch  # lazy: loopq imports without torch

    if fresh is None or loaded.is_meta or loaded.shape != fresh.shape:
        return False
    # A model cast as a whole has cast its buffers too.
    return bool(torch.equal(loaded.cpu(), fresh.to(loaded.dtype).cpu()))
