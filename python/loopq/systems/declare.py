"""Declare the weights of named modules, and find them again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from loopq.errors import SystemContractError
from loopq.layers.shared import SharedParameter
from loopq.storage.names import names_of

if TYPE_CHECKING:
    from torch import nn

    from loopq.storage.weights import Orientation


def find_prefix(model: nn.Module, marker: str) -> str | None:
    """Return the prefix of the module name `marker` ("", "gpt.", ...), or None without such a module.

    Published classes often wrap the paper's model again, which adds a prefix to every name.
    """
    for name, _ in model.named_modules(remove_duplicate=False):
        if name == marker or name.endswith("." + marker):
            return str(name).removesuffix(marker)
    return None


def is_embedding(model: nn.Module, module_name: str) -> bool:
    """Whether a module shares its weight with an embedding, so that rounding it also rounds the inputs."""
    owners = owners_of_parameters(model)[id(model.get_submodule(module_name).weight)]
    return any("Embedding" in type(model.get_submodule(owner)).__name__ for owner in owners)


def owners_of_parameters(model: nn.Module) -> dict[int, list[str]]:
    """Map id(parameter) to the names of all modules that hold it as their `weight`, first owner first."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        weight = module._parameters.get("weight")
        if weight is not None:
            owners.setdefault(id(weight), []).append(name)
    return owners


def parameter_of(model: nn.Module, shared: SharedParameter | str) -> nn.Parameter:
    """Return the parameter object of a shared weight, or of the name of one."""
    if isinstance(shared, SharedParameter) and shared.owners:
        owned: nn.Parameter = model.get_submodule(shared.owners[0]).weight
        return owned
    name = shared if isinstance(shared, str) else shared.name
    parameter: nn.Parameter = model.get_parameter(names_of(model).in_model(name))
    return parameter


def declare(
    model: nn.Module, modules: Iterable[tuple[str, dict[str, Any]]], invocations: int
) -> tuple[SharedParameter, ...]:
    """Declare the weights of the named modules, each parameter once.

    Parameters
    ----------
    model : nn.Module
        The whole model.
    modules : iterable of (str, dict)
        Module name and the fields of `SharedParameter` that differ from the defaults; "role" is required.
    invocations : int
        Calls in one rollout, unless a module's fields give another number.

    Raises
    ------
    SystemContractError
        If a module is missing, or its weight is not a matrix.
    """
    from torch import nn  # lazy: loopq imports without torch

    owners, names = owners_of_parameters(model), names_of(model)
    seen: set[int] = set()
    declared = []
    for name, fields in modules:
        try:
            module = model.get_submodule(name)
        except AttributeError as error:
            raise SystemContractError(f"the model has no module {name!r}") from error
        weight = module._parameters.get("weight")
        if weight is None or weight.ndim != 2:
            raise SystemContractError(f"module {name!r} has no weight matrix")
        if id(weight) in seen:
            continue
        seen.add(id(weight))
        others = [other for other in owners[id(weight)] if other != name]
        table = any(isinstance(model.get_submodule(owner), nn.Embedding) for owner in (name, *others))
        transposed = type(module).__name__ == "Conv1D"
        orientation: Orientation = "in_out" if transposed else "table" if table else "out_in"
        rows, columns = weight.shape
        out_features, in_features = (columns, rows) if orientation == "in_out" else (rows, columns)
        declared.append(
            SharedParameter(
                name=names.of_layer(f"{name}.weight"),
                owners=(name, *others),
                in_features=in_features,
                out_features=out_features,
                orientation=orientation,
                **({"invocations": invocations} | fields),
            )
        )
    return tuple(declared)
