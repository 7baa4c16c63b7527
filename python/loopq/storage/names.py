"""Names of a model's tensors in its files, if they differ from those of its modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor, nn

T = TypeVar("T")
_KEY = "loopq_file_names"


class Names:
    """Names of tensors in files and in a model. They are equal unless a subclass overrides this."""

    def in_file(self, name: str) -> str:
        """Return the file's name of the model's tensor `name`."""
        return name

    def of_layer(self, name: str) -> str:
        """Return the file's name of a quantizable weight. It is the model's name if files keep it in another layout."""
        return self.in_file(name)

    def module(self, model: nn.Module, name: str) -> str:
        """Return the name that files would give to a module, for tensors stored beside its weight."""
        return name

    def in_model(self, name: str) -> str:
        """Return the model's name of the file's tensor `name`. It is the same if the model has no such tensor."""
        return name

    def target(self, name: str) -> str:
        """Return the name of the model's tensor that contains a file's tensor."""
        return self.in_model(name)

    def stored(self, model: nn.Module, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return tensors of a model in the form of its files."""
        return state

    def taken(
        self,
        model: nn.Module,
        tensors: Mapping[str, T],
        read: Callable[[T], Tensor],
        write: Callable[[Tensor], T],
    ) -> Mapping[str, T]:
        """Return tensors of files in the model's form. `read` and `write` convert those that change."""
        return tensors


def names_of(model: nn.Module) -> Names:
    """Return the file names found for a model, or those of its modules."""
    names: Names = vars(model).get(_KEY) or Names()
    return names


def set_names(model: nn.Module, names: Names) -> None:
    """Let `names_of` return these for a model."""
    vars(model)[_KEY] = names
