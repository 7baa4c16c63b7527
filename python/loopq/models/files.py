"""Names and layouts of the files of a transformers class, by its own loading and saving rules, and what it leaves."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from loopq.errors import CheckpointError, MissingExtraError, require
from loopq.formats import hf_folder
from loopq.models.classes import Findings
from loopq.storage.files import RawTensor
from loopq.storage.model_files import check_ties, passed_over, set_beside
from loopq.storage.names import Names, names_of, set_names
from loopq.systems.looped import unlooped
from loopq.systems.views import copied
from loopq.terminal.table import some

if TYPE_CHECKING:
    from torch import Tensor, nn

T = TypeVar("T")
#: Types of numbers that are weights. Those of 8 bits are so without a scale beside them.
_PLAIN, _FLOAT8 = ("F64", "F32", "F16", "BF16"), ("F8_E4M3", "F8_E5M2")


class FileNames(Names):
    """Names in the files of a model of transformers.

    Parameters
    ----------
    model : nn.Module
        The model, with experts in loopq's form.
    rules : sequence
        Renamings and conversions of transformers, in their order.
    keys : iterable of str
        Names in the files. Tensors without one get the name that transformers would save.
    """

    def __init__(self, model: Any, rules: list[Any], keys: Iterable[str]) -> None:
        loading = require("transformers.core_model_loading")
        self._converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
        renamings = [rule for rule in rules if not isinstance(rule, loading.WeightConverter)]
        state = model.state_dict(keep_vars=True)
        place = (getattr(model, "base_model_prefix", None), state)
        self._own: dict[str, str] = {}
        #: Tensors of the model that are made of others in the files: their names, and the pattern that found each.
        self._made: dict[str, dict[str, str]] = {}
        for key in sorted(keys, key=loading.dot_natural_key):
            plain, _ = loading.rename_source_key(key, renamings, [], *place)
            name, pattern = loading.rename_source_key(key, renamings, self._converters, *place)
            if pattern is not None and name in state:
                self._made.setdefault(name, {})[key] = pattern
            elif plain in state:
                self._own[key] = plain
        rest = {name: t.to("meta") for name, t in state.items() if name not in {*self._own.values()}}
        self._rules, self._state = rules, tuple(state)
        saved = self._saved(model, rest)
        places = {id(tensor): key for key, tensor in saved.items()}
        for name, tensor in rest.items():
            if name not in self._made and id(tensor) in places:
                self._own[places[id(tensor)]] = name
        self._files = {name: key for key, name in self._own.items()}

    def in_file(self, name: str) -> str:
        """As of `Names`."""
        return self._files.get(name, name)

    def of_layer(self, name: str) -> str:
        """As in `Names`. Tensors stored together with it also keep the model's names from then on."""
        if name in self._files:
            return self._files[name]
        mates = {name}
        for rule in (rule.reverse_transform() for rule in self._converters if len(rule.target_patterns) > 1):
            if rule.rename_source_key(name)[1] is not None:
                mates |= {other for other in self._state if rule.rename_source_key(other)[1] is not None}
        for other in mates:
            self._own[other] = self._files[other] = other
            self._made.pop(other, None)
        return name

    def module(self, model: nn.Module, name: str) -> str:
        """As of `Names`."""
        import torch  # lazy: loopq imports without torch

        # No weight rule matches this name, so only the rules for modules apply.
        saved = self._saved(model, {f"{name}.weight_packed": torch.empty(0)})
        return next(iter(saved)).removesuffix(".weight_packed")

    def in_model(self, name: str) -> str:
        """As of `Names`."""
        return self._own.get(name, name)

    def target(self, name: str) -> str:
        """As of `Names`."""
        return next((target for target, keys in self._made.items() if name in keys), self.in_model(name))

    def stored(self, model: nn.Module, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """As in `Names`. It reverts the conversions of transformers at loading."""
        renamed = {self._files[name]: tensor for name, tensor in state.items() if name in self._files}
        rest = {name: tensor.detach() for name, tensor in state.items() if name not in self._files}
        return renamed | self._saved(model, rest)

    def _saved(self, model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors as transformers would save them."""
        loading = require("transformers.core_model_loading")
        if not state:
            return {}
        saved: dict[str, Tensor] = loading.revert_weight_conversion(
            copied(model, _weight_conversions=self._rules), state
        )
        return saved

    def taken(
        self,
        model: nn.Module,
        tensors: Mapping[str, T],
        read: Callable[[T], Tensor],
        write: Callable[[Tensor], T],
    ) -> Mapping[str, T]:
        """As of `Names`."""
        named = {self.in_model(key): tensor for key, tensor in tensors.items()}
        for name, keys in self._made.items():
            if not set(keys) & set(tensors):
                continue
            rule = copy.deepcopy(
                next(c for c in self._converters if set(keys.values()) <= {*c.source_patterns})
            )
            for key, pattern in keys.items():
                rule.add_tensor(name, key, pattern, read(tensors[key]))
                named.pop(key)
            for target, converted in rule.convert(name, model=model, config=model.config).items():
                named[target] = write(converted[0] if isinstance(converted, list) else converted)
        return named


def find_names(model: Any, keys: Iterable[str]) -> None:
    """Find the names of a model's tensors in its files (`keys`) where transformers renames or converts them.

    Afterwards `loopq.storage.names.names_of` returns them.
    """
    rules = conversions(model)
    if rules:
        set_names(model, FileNames(model, rules, keys))


def conversions(model: Any) -> list[Any]:
    """Rules of transformers 5 for loading the files of a model's class. Empty for other classes and versions."""
    try:
        mapping = require("transformers.conversion_mapping").get_model_conversion_mapping
        known = isinstance(model, require("transformers").PreTrainedModel)
    except (MissingExtraError, AttributeError):
        return []
    # Rules go by the name of the class.
    return list(mapping(unlooped(model), add_legacy=False)) if known else []


def account(
    model: nn.Module, stored: Mapping[str, RawTensor], unexpected: Collection[str], source: str
) -> Findings:
    """Account for every tensor of the files. What the class passes over, such as a draft head, stays beside the model.

    Parameters
    ----------
    model : nn.Module
        A loaded model.
    stored : mapping of str to RawTensor
        Tensors of its files.
    unexpected : collection of str
        Tensors without a place, by the report of what loaded them. transformers leaves out those that it passes over.
    source : str
        Named in messages.

    Raises
    ------
    CheckpointError
        Numbers are codes whose scales have no place, or one parameter has several values.
    """
    names, state = names_of(model), model.state_dict(keep_vars=True)
    # A stack of experts has become modules here, and its name in the files is that of no tensor.
    modules = {name for name, _ in model.named_modules()}
    over = {
        n for n in passed_over(model, stored) if names.target(n) not in state and _module(n) not in modules
    }
    left = tuple(sorted({*unexpected} - over))
    scaled = {_module(name) for name in left}
    for name, tensor in stored.items():
        place = state.get(names.in_model(name))
        plain = tensor.dtype in _PLAIN or (tensor.dtype in _FLOAT8 and _module(name) not in scaled)
        if place is not None and place.is_floating_point() and not plain:
            raise CheckpointError(
                f"{source}: {name} holds codes ({tensor.dtype}), and config.json says nothing of their scales "
                f"({hf_folder.KEY}); take the config.json of these files, or weights in bfloat16"
            )
    _check_head(model, stored, source)
    set_beside(model, {name: stored[name] for name in sorted(over)})
    note = f"kept as they are, which the model's class does not read: {some(sorted(over))}" if over else ""
    return Findings(unexpected=left).noted(note)


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _check_head(model: Any, stored: Mapping[str, RawTensor], source: str) -> None:
    """Reject a head of its own in the files if config.json ties it. transformers keeps both, engines only one."""
    if not getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        return
    ends = []
    with contextlib.suppress(NotImplementedError, AttributeError):  # a class without a table of tokens
        ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    tied = {f"{name}.weight": ends for name, module in model.named_modules() if module in ends}
    in_file = {names_of(model).in_file(name): name for name in tied}
    check_ties(tied, {in_file[n]: t for n, t in stored.items() if n in in_file}, source)
