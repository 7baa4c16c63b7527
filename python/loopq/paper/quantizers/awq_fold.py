"""AWQ with scales that fold: powers of two, one scale for all layers of an input, taken by the layer before.

A power of two changes exponents alone. So the folded model gives the same logits, bit for bit, in every floating type.
"""

from __future__ import annotations

import contextlib
import copy
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from loopq.errors import CheckpointError
from loopq.layers.layer import LayerSettings, QuantizedLayer
from loopq.layers.reader import TensorReader
from loopq.layers.transforms import ChannelScale
from loopq.paper.quantizers.awq import AWQ, channel_scale
from loopq.quantizers import QUANTIZERS, Problem
from loopq.quantizers.folding import FOLDINGS, Folding, Folds
from loopq.quantizers.task import Task
from loopq.storage.files import RawTensor, float_to_raw
from loopq.storage.names import names_of
from loopq.storage.schema import checked

if TYPE_CHECKING:
    from torch import Tensor, nn

    #: Identity of a tensor's values while it is alive: views of all of them have the same.
    Key: TypeAlias = tuple[int, int, int]

_AGAIN = "Quantize with --method awq-fold"


@QUANTIZERS.register("awq-fold")
@dataclass(frozen=True)
class FoldedAWQ(AWQ):
    """AWQ with powers of two and one scale for each input, which an export folds into the layer before.

    Notes
    -----
    Layers that read one input, such as q, k and v, get the power with the least sum of their losses. `awq` becomes this
    method if another format than loopq's own is written.
    """

    transforms: ClassVar[bool] = False
    folds: ClassVar[bool] = True
    in_other_formats: ClassVar[str] = ""

    def scale(self, magnitude: NDArray[np.float64], power: float) -> ChannelScale:
        """Return the scale of a power, rounded to powers of two."""
        exponents = np.rint(np.log2(channel_scale(magnitude, power)))
        return ChannelScale(np.exp2(exponents).astype(np.float32))

    def quantize_all(self, problems: Sequence[Problem]) -> list[QuantizedLayer]:
        """Quantize layers. Those of one input share its scale."""
        inputs: dict[int, list[Problem]] = {}
        for p in problems:
            inputs.setdefault(id(p.shared), []).append(p)
        for alike in inputs.values():
            self._shared(alike)
        return super().quantize_all(problems)

    def quantize(self, problem: Problem) -> QuantizedLayer:
        """Quantize a layer, with the scale of its input if there is one."""
        return self.scaled(problem, *self._shared([problem]))

    def _shared(self, problems: Sequence[Problem]) -> tuple[float, ChannelScale]:
        return problems[0].once(self, lambda: self.search(problems))


def find_folds(model: nn.Module, readers: Mapping[str, Sequence[str]], run: Callable[[], Tensor]) -> Folds:
    """Find the modules that take the scales of some layers, and show that no other code reads their outputs.

    A norm takes the scale of the layers that read its output. A linear layer takes that of a layer beside it whose
    input is its output times something else: "up" before "down", or "v" before "o" with as many heads.

    Parameters
    ----------
    model : nn.Module
        The model. It does not change.
    readers : mapping of str to sequence of str
        Layers with a scale, and the modules that hold each.
    run : callable
        Runs a rollout and returns its output. It is called twice.

    Raises
    ------
    CheckpointError
        A scale has no place. The message names the layer and the reason.

    Notes
    -----
    The second run divides the output of each module by powers of two, and multiplies the inputs of the layers by them.
    Both outputs are equal, bit for bit, only if each value that is divided reaches those layers and nothing else.
    """
    if not readers:
        return {}
    seen = _Seen(model)
    with seen.watched():
        before = run()
    modules = dict(model.named_modules(remove_duplicate=False))
    held = {name: [modules[owner] for owner in owners] for name, owners in readers.items()}
    scaled = {id(module) for owners in held.values() for module in owners}
    folds: dict[str, list[str]] = {}
    for name, owners in held.items():
        folds.setdefault(seen.source(name, owners), []).append(name)
    for source, names in folds.items():
        other = next((n for n in seen.readers(modules[source]) if id(modules[n]) not in scaled), None)
        if other is not None:
            _refuse(names[0], f"{other} reads the output of {source} too, and is not scaled")
        seen.check_factor(source, names[0])
    if _same(before, run, [(modules[s], held, names) for s, names in folds.items()]):
        return folds
    for source, names in folds.items():
        if not _same(before, run, [(modules[source], held, names)]):
            _refuse(
                names[0], f"something else reads the output of {source} too, or its input is not that output"
            )
    raise CheckpointError(
        "awq: the scales fold one by one, but not together; the model's output is not the same twice"
    )


def refuse_unlike(folds: Folds, tasks: Sequence[Task]) -> None:
    """Refuse layers of one input that would have scales of their own.

    Raises
    ------
    CheckpointError
        They differ in their method or their steps.
    """
    settings = {t.name: (t.config.method, t.config.calibration) for t in tasks}
    for names in folds.values():
        for name in names:
            if settings[name] != settings[names[0]]:
                raise CheckpointError(
                    f"layer {name}: reads the input of {names[0]} with another method or other steps, so that no AWQ "
                    "scale fits both. Give both the same, or keep loopq's own format"
                )


def fold(
    layers: Mapping[str, QuantizedLayer], dense: Mapping[str, RawTensor], folds: Folds, model: nn.Module
) -> tuple[dict[str, QuantizedLayer], dict[str, RawTensor]]:
    """Return layers without scales, and the tensors of the modules that take them.

    Parameters
    ----------
    layers, dense : mapping
        Those of a checkpoint.
    folds : Folds
        As `find_folds` returns them.
    model : nn.Module
        The model that it found them in.

    Raises
    ------
    CheckpointError
        Layers of one input have different scales, or a scale does not fold exactly.
    """
    layers, dense, in_file = dict(layers), dict(dense), names_of(model).in_file
    for source, names in folds.items():
        scale = _common_scale([layers[name] for name in names])
        for name in (in_file(f"{source}.weight"), in_file(f"{source}.bias")):
            if name in layers:
                layers[name] = _divided_layer(layers[name], scale, names[0])
            elif name in dense:
                dense[name] = _divided(name, dense[name], scale, names[0])
            elif name.endswith("weight"):
                _refuse(names[0], f"{name}, which takes its scale, is stored in another form")
        for name in names:
            layers[name] = replace(layers[name], transform=None).with_report(folded_into=source)
    return layers, dense


@dataclass
class _Seen:
    """Calls of the modules with a weight in one run, in order."""

    model: nn.Module
    names: dict[int, str] = field(default_factory=dict)
    inputs: dict[int, list[Key]] = field(default_factory=dict)
    makers: dict[Key, str] = field(default_factory=dict)
    #: Arguments and output of a last call, by module.
    last: dict[str, tuple[Any, Any, Tensor]] = field(default_factory=dict)
    _alive: list[Any] = field(default_factory=list)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Scope of the run."""
        self.names = {
            id(m): n for n, m in self.model.named_modules() if m._parameters.get("weight") is not None
        }
        chosen = [m for m in self.model.modules() if id(m) in self.names]
        with _hooked([(m, self._called, self._ended) for m in chosen]):
            yield

    def _called(self, module: Any, args: Any, kwargs: Any) -> None:
        for value in [v for v in (*args, *kwargs.values()) if hasattr(v, "data_ptr")][:1]:
            # A tensor in memory keeps its address to itself.
            self._alive.append(value)
            self.inputs.setdefault(id(module), []).append(_key(value))

    def _ended(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if hasattr(output, "data_ptr"):
            self._alive.append(output)
            self.makers.setdefault(_key(output), self.names[id(module)])
            self.last[self.names[id(module)]] = (args, kwargs, output)

    def source(self, name: str, owners: Sequence[Any]) -> str:
        """Name of the module that takes the scale of a layer."""
        from torch import nn  # lazy: loopq imports without torch

        keys = [key for module in owners for key in self.inputs.get(id(module), [])]
        if not keys:
            _refuse(name, "it is not called in a rollout")
        makers = {self.makers.get(key) for key in keys}
        maker = makers.pop() if len(makers) == 1 else ""
        if maker is None:
            maker = self._beside(owners[0])
        module = self.model.get_submodule(maker) if maker else None
        weight = None if module is None else module._parameters["weight"]
        if weight is None or not (weight.ndim == 1 or type(module) is nn.Linear):
            _refuse(name, "no norm with a weight and no linear layer makes its input alone")
        shared = [m for m in self.model.modules() if any(p is weight for p in m._parameters.values())]
        if len(shared) > 1:
            _refuse(name, f"another module has the weight of {maker}")
        if weight.shape[0] != owners[0]._parameters["weight"].shape[-1]:
            _refuse(
                name, f"{maker} has {weight.shape[0]} outputs, which are not its input channel by channel"
            )
        return maker

    def _beside(self, module: Any) -> str:
        """Name of the last linear layer that is called before a module and stands beside it."""
        from torch import nn  # lazy: loopq imports without torch

        place, order = self.names[id(module)].rpartition(".")[0], list(self.inputs)
        earlier = (self.names[i] for i in order[: order.index(id(module))])
        beside = [self.model.get_submodule(n) for n in earlier if n.rpartition(".")[0] == place]
        linear = [m for m in beside if type(m) is nn.Linear]
        return self.names[id(linear[-1])] if linear else ""

    def readers(self, source: nn.Module) -> list[str]:
        """Names of the modules that read the output of a module as it is."""
        outputs = {key for key, name in self.makers.items() if name == self.names[id(source)]}
        return [self.names[i] for i, keys in self.inputs.items() if outputs & {*keys}]

    def check_factor(self, source: str, reader: str) -> None:
        """Refuse a norm whose output is not proportional to its weight and bias, such as Gemma's."""
        import torch  # lazy: loopq imports without torch

        module = self.model.get_submodule(source)
        if module._parameters["weight"].ndim > 1:
            return
        args, kwargs, output = self.last[source]
        divided, scale = copy.deepcopy(module), _trial(output)
        with torch.no_grad():
            for parameter in (divided._parameters["weight"], divided._parameters.get("bias")):
                if parameter is not None:
                    parameter.div_(scale)
            if not torch.equal(divided(*args, **kwargs), output / scale):
                _refuse(reader, f"the weight of {source} is no factor of its output")


def _same(
    before: Tensor,
    run: Callable[[], Tensor],
    trials: Sequence[tuple[nn.Module, Mapping[str, Sequence[Any]], Sequence[str]]],
) -> bool:
    """Whether a run is the same with divided outputs of modules and multiplied inputs of their readers."""
    import torch  # lazy: loopq imports without torch

    def divide(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        return output / _trial(output)

    def multiply(module: Any, args: Any, kwargs: Any) -> Any:
        if args:
            return (args[0] * _trial(args[0]), *args[1:]), kwargs
        name, value = next(iter(kwargs.items()))
        return args, {**kwargs, name: value * _trial(value)}

    hooks: list[tuple[Any, Any, Any]] = [(source, None, divide) for source, _, _ in trials]
    # A module that takes a scale may also have one.
    hooks += [(m, multiply, None) for _, held, names in trials for name in names for m in held[name]]
    with _hooked(hooks):
        return bool(torch.equal(before, run()))


@contextlib.contextmanager
def _hooked(hooks: Sequence[tuple[Any, Any, Any]]) -> Iterator[None]:
    """Put functions before and after the calls of modules in this thread."""
    thread, handles = threading.get_ident(), []

    def here(hook: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: hook(*given) if threading.get_ident() == thread else None

    try:
        for module, before, after in hooks:
            if before is not None:
                handles.append(module.register_forward_pre_hook(here(before), with_kwargs=True))
            if after is not None:
                handles.append(module.register_forward_hook(here(after), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _trial(like: Tensor) -> Tensor:
    """Powers of two for the channels of a tensor. Neighbours have different ones."""
    import torch  # lazy: loopq imports without torch

    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-2, 3, (like.shape[-1],), generator=generator)
    return torch.exp2(exponents.float()).to(like.device, like.dtype)


def _key(value: Tensor) -> Key:
    return value.data_ptr(), value.numel(), 0 if value.is_inference() else value._version


def _common_scale(layers: Sequence[QuantizedLayer]) -> NDArray[np.float32]:
    scales = [x.transform.scale if isinstance(x.transform, ChannelScale) else None for x in layers]
    first = scales[0]
    if first is None or any(s is None or not np.array_equal(s, first) for s in scales):
        _refuse(
            layers[-1].name, f"its scale is not that of {layers[0].name}, which reads the same input", _AGAIN
        )
    if (np.frexp(first)[0] != 0.5).any():
        _refuse(layers[0].name, "its scale has other numbers than powers of two, which are not exact", _AGAIN)
    return first


def _divided_layer(layer: QuantizedLayer, scale: NDArray[np.float32], reader: str) -> QuantizedLayer:
    """Divide the outputs of a quantized layer."""
    rows = scale[:, None]
    zeros = layer.zeros
    if zeros is not None and zeros.dtype.kind == "f":
        zeros = zeros / rows
    divided = replace(layer, scales=layer.scales / rows, zeros=zeros)
    settings = checked(LayerSettings, divided.settings(), layer.name, CheckpointError)
    try:
        with np.errstate(over="ignore"):
            tensors = TensorReader(layer.name, divided.tensors())
        stored = QuantizedLayer.from_tensors(settings, tensors, layer.report).stored_values()
    except CheckpointError:
        stored = np.zeros_like(rows)
    if not np.array_equal(stored * rows, layer.stored_values()):
        _refuse(reader, f"the scales of {layer.name}, {layer.grid.scale_dtype}, cannot take it")
    return divided


def _divided(name: str, tensor: RawTensor, scale: NDArray[np.float32], reader: str) -> RawTensor:
    """Divide the outputs of a weight, or a bias."""
    values = tensor.float32()
    rows = scale.reshape(-1, *[1] * (values.ndim - 1))
    with np.errstate(over="ignore"):
        divided = float_to_raw(values / rows, "F32" if tensor.dtype == "F64" else tensor.dtype)
    if divided.dtype != tensor.dtype or not np.array_equal(divided.float32() * rows, values):
        _refuse(reader, f"the numbers of {name}, {tensor.dtype}, cannot take it")
    return divided


def _refuse(name: str, why: str, instead: str = "") -> NoReturn:
    pattern = re.sub(r"\.\d+\.", ".*.", name)
    instead = instead or f"Give --layer '{pattern}=>method=rtn'"
    raise CheckpointError(
        f"layer {name}: its AWQ scale does not fold: {why}. {instead}, or keep loopq's own format"
    )


FOLDINGS.register("channel_scale")(Folding(find_folds, refuse_unlike, fold))
