"""Names of a model's tensors in its files, where they are not those of its modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor, nn

T = TypeVar("T")
_KEY = "loopq_file_names"


class Names:
    """Names of tensors in files and in a model: the same, unless a subclass knows better."""

    def in_file(self, name: str) -> str:
        """Name in a file of what the model calls `name`."""
        return name

    def of_layer(self, name: str) -> str:
        """Name in a file of a weight that may be quantized: the model's own where files keep it in another layout."""
        return self.in_file(name)

    def module(self, model: nn.Module, name: str) -> str:
        """Name that files would give to a module, so that what is stored beside its weight finds it."""
        return name

    def in_model(self, name: str) -> str:
        """Name in the model of what a file calls `name`; itself where the model has no such tensor."""
        return name

    def target(self, name: str) -> str:
        """Name of the model's tensor that a tensor of a file is, or is a part of."""
        return self.in_model(name)

    def stored(self, model: nn.Module, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return tensors of a model as its files hold them."""
        return state

    def taken(
        self,
        model: nn.Module,
        tensors: Mapping[str, T],
        read: Callable[[T], Tensor],
        write: Callable[[Tensor], T],
    ) -> Mapping[str, T]:
        """Return tensors of files as the model holds them; `read` and `write` are asked for those that change."""
        return tensors


def names_of(model: nn.Module) -> Names:
    """Return the names in files that were found for a model, or those of its modules."""
    found: Names = vars(model).get(_KEY) or Names()
    return found


def set_names(model: nn.Module, names: Names) -> None:
    """Let `names_of` return these for a model."""
    vars(model)[_KEY] = names
