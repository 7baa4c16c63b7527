"""Check buffers that a checkpoint does not store against a newly built module after loading.

transformers 5 builds a model without memory and fills only the tensors of the checkpoint. Classes with their own
weight initialisation may have buffers registered with `persistent=False` (rotary frequencies, masks). These then
contain arbitrary memory, and no error is raised.
"""

from __future__ import annotations

import contextlib
import copy
from typing import TYPE_CHECKING, Any

from loopq.errors import CheckpointError
from loopq.models.blank import building, drawn, on_meta

if TYPE_CHECKING:
    from torch import Tensor, nn


def unsaved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Map names to the buffers that `state_dict` omits."""
    return {
        f"{prefix}.{name}".lstrip("."): buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name in module._non_persistent_buffers_set
    }


def fresh_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Build the model's class again from its configuration and return the unsaved buffers.

    Raises
    ------
    CheckpointError
        If the class cannot be built. Nothing can be checked then.
    """

    def make() -> Any:
        return type(model)(copy.deepcopy(model.config))

    with building():
        # A constructor that computes with its parameters needs real ones, so it is tried once more.
        with contextlib.suppress(Exception), on_meta():
            buffers = unsaved_buffers(make())
            if not any(buffer.is_meta for buffer in buffers.values()):
                return buffers
        try:
            with drawn():
                return unsaved_buffers(make())
        except Exception as cause:
            raise CheckpointError(
                f"{type(model).__name__} cannot be built again from its configuration ({cause}), so its buffers "
                "that are not in the checkpoint cannot be checked; load the model with another version of "
                "transformers"
            ) from cause


def repair_buffers(model: nn.Module) -> tuple[str, ...]:
    """Compare every unsaved buffer of a model with a fresh one, correct those that differ and return their names.

    Raises
    ------
    CheckpointError
        If a buffer cannot be checked: the new one is random, not finite, or of another shape.
    """
    loaded = unsaved_buffers(model)
    if not loaded:
        return ()
    fresh = fresh_buffers(model)
    wrong = [name for name, value in loaded.items() if not _same(value, fresh.get(name))]
    if not wrong:
        return ()
    again = fresh_buffers(model)
    for name in wrong:
        value, target = fresh.get(name), loaded[name]
        if value is None or value.shape != target.shape:
            raise CheckpointError(f"buffer {name}: a freshly built model has another shape or no such buffer")
        if not value.equal(again[name]):
            raise CheckpointError(f"buffer {name}: not in the checkpoint and not the same in two new models")
        prefix, _, last = name.rpartition(".")
        device = next(model.parameters()).device if target.is_meta else target.device
        model.get_submodule(prefix)._buffers[last] = value.to(device, target.dtype)
    return tuple(wrong)


def _same(loaded: Tensor, fresh: Tensor | None) -> bool:
    if fresh is None or loaded.is_meta or loaded.shape != fresh.shape:
        return False
    # Casting the whole model has also cast its buffers.
    return bool(loaded.cpu().equal(fresh.to(loaded.dtype).cpu()))
