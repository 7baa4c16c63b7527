"""Interface of a looped system: its rollout, its shared parameters and, if it has one, its step.

A *rollout* is everything the model does for a batch of prompts from the initial state to the output. An *invocation*
is one call of a shared parameter's module within it. Step t of a parameter is its t-th invocation. Parameters are
identified by object, not by name, since systems tie one weight to several modules.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from loopq.errors import CalibrationError, ConfigError, LoopqError, SystemContractError
from loopq.layers.loop_spec import MAX_STEPS
from loopq.storage.names import names_of
from loopq.storage.schema import Name, checked

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from loopq.systems.program import Program

Orientation = Literal["out_in", "in_out", "table", "conv"]
Output = Literal["logits", "hidden"]
Treatment = Literal["gptq", "rtn", "dense"]
#: Text to token ids.
Encode = Callable[[str], Sequence[int]]
Tensors: TypeAlias = "dict[str, Tensor]"
#: Takes the state after a step and the logits read from it, (width) and (vocabulary) of one token, and a threshold.
ExitRule: TypeAlias = "Callable[[Tensor, Tensor, float], bool]"
#: Names of a cache in arguments and outputs: transformers from 5.24 on, before it, and its recurrences before it.
_CACHES = ("cache", "past_key_values", "cache_params")
#: Whether the rollouts of a thread keep their graph.
_GRAPH = threading.local()


@dataclass(frozen=True)
class ModelClass:
    """Builds a model from its ``config.json`` and fills it from its files.

    Parameters
    ----------
    build : callable
        Takes the contents of ``config.json`` and returns the model with arbitrary weights.
    encode : callable, optional
        Text to token ids, for folders without a tokenizer.
    rename : callable, optional
        Takes the stored tensors by name and returns them under the model's names.
    """

    build: Callable[[dict[str, Any]], nn.Module]
    encode: Encode | None = None
    rename: Callable[[Tensors], Tensors] | None = None


@dataclass(frozen=True)
class Batch:
    """Prompts of equal length that run together.

    Parameters
    ----------
    input_ids : int64 Tensor of shape (n_prompts, n_tokens)
        Token ids, without padding.
    prompts : tuple of int
        Number of each prompt within the whole data set. Together with `seed` it fixes the prompt's initial state, so
        batching does not change it.
    seed : int
        Seed of the initial states.
    by_token : bool
        Draw the noise of every token from its own generator. A token then starts from the same state regardless of how
        many follow. Text generation needs this.
    """

    input_ids: Tensor
    prompts: tuple[int, ...]
    seed: int = 0
    by_token: bool = False

    def __post_init__(self) -> None:
        if self.input_ids.ndim != 2 or self.input_ids.shape[0] != len(self.prompts):
            raise ConfigError(
                f"a batch has input_ids of shape (n_prompts, n_tokens) and a number for each prompt; got "
                f"shape {tuple(self.input_ids.shape)} and {len(self.prompts)} numbers"
            )

    def noise(self, *shape: int, std: float = 1.0, cut: float | None = None, first: int = 0) -> Tensor:
        """Draw Gaussian noise from a separate generator for each prompt.

        Parameters
        ----------
        *shape : int
            Shape for one prompt, tokens first.
        std : float
            Standard deviation.
        cut : float, optional
            Draw from the normal distribution truncated at +- `cut` standard deviations.
        first : int
            Skip the tokens before this one.

        Returns
        -------
        float32 Tensor on the CPU of shape ``(n_prompts, *shape)``, without the skipped tokens
            A prompt gets the same numbers in every batch. The global generator does not change.
        """
        import torch  # lazy: loopq imports without torch

        def draw(number: int, size: tuple[int, ...]) -> Tensor:
            generator = torch.Generator().manual_seed(number % (1 << 63))
            # Explicit, since the calling program may have changed torch's defaults.
            row = torch.empty(*size, dtype=torch.float32, device="cpu")
            if cut is None:
                return row.normal_(generator=generator)
            torch.nn.init.trunc_normal_(row, std=1.0, a=-cut, b=cut, generator=generator)
            return row

        rows = []
        for prompt in self.prompts:
            number = self.seed * 1_000_003 + prompt
            if self.by_token:
                tokens = [draw(number * 1_000_033 + 1 + i, shape[1:]) for i in range(first, shape[0])]
                rows.append(torch.stack(tokens) * std)
            else:
                rows.append(draw(number, shape)[first:] * std)
        return torch.stack(rows)


@dataclass(frozen=True)
class SharedParameter:
    """One weight that the loop uses at every step.

    Parameters
    ----------
    name : str
        Full name of the parameter in the model's files, or under its first owner ("transformer.adapter.weight").
    owners : tuple of str
        Names of all modules that hold this parameter, the first owner first. Empty if no module is called with it. Its
        products are watched then.
    in_features, out_features : int
        Input and output width of the product.
    orientation : {"out_in", "in_out", "table", "conv"}
        Storage of the weight: like `nn.Linear`, transposed like GPT-2's `Conv1D`, as a lookup table, or like
        `nn.Conv1d` with a third axis of length 1.
    invocations : int
        Calls in one rollout of the requested depth.
    role : str
        Kind of layer: "adapter", "attention", "mlp", "modulation", "head" or another term of the field.
    exposed : bool
        No identity path leads around the layer, so its whole error is fed back into the loop.
    treatment : {"gptq", "rtn", "dense"}
        Default treatment. "gptq" is calibrated. "rtn" is rounded by the paper's methods and calibrated by others
        (`Method.rounds_as_published`). "dense" stays unchanged.
    reason : str
        Reason for a treatment other than "gptq".
    fused : str
        Blocks of output rows in one weight, in order, joined by "+" ("q+k+v", "gate+up"). "/head" at the end means
        that they repeat head by head. Empty if the weight is one projection.
    routed_in : str
        For an expert, the module that routes rows to experts. Its calls are then the steps, counted by `invocations`.
        A step may give the expert any number of rows, or none.
    """

    name: str
    owners: tuple[str, ...]
    in_features: int
    out_features: int
    orientation: Orientation
    invocations: int
    role: str
    exposed: bool = False
    treatment: Treatment = "gptq"
    reason: str = ""
    fused: str = ""
    routed_in: str = ""

    def matrix(self, stored: Tensor) -> Tensor:
        """View a stored tensor of this weight, or its gradient, in shape (out_features, in_features)."""
        plain = stored[..., 0] if self.orientation == "conv" else stored
        return plain.T if self.orientation == "in_out" else plain

    def __post_init__(self) -> None:
        """Reject a name that cannot be a file name, as needed in a dump and while layers are solved."""
        checked(Name, self.name, "parameter", SystemContractError)


class LoopedSystem(ABC):
    """Adapter of one kind of looped model.

    A subclass registers itself under its name in `loopq.systems.SYSTEMS`. It takes the model in any precision and on
    any device, and does not change it.

    Parameters
    ----------
    model : nn.Module
        The model, in eval mode.

    Attributes
    ----------
    name : str
        Name in the registry.
    summary : str
        One-line description of the loop for `loopq systems`.
    checkpoints : tuple of (str, int)
        Published models of this kind and the number of weights quantized by default.
    code : {"checkpoint", "transformers", "own"}
        Source of the published models' class: the checkpoint itself, transformers, or neither.
    transformers : str
        Versions that their class needs, if these are not the usual ones.
    also : str
        Their other requirements, in words.
    exposed : tuple of str
        Layers without an identity path around them, in words.
    idle : tuple of str
        Name prefixes of parameters that no rollout uses. A checkpoint may lack them.
    model_types : tuple of str
        ``model_type`` in every ``config.json`` that `model_class` supports.
    has_steps : bool
        Whether `embed`, `initial_state`, `step` and `predict` exist. Diagnoses that intervene in the loop need them.
    grows : bool
        Whether a step appends to the state. It then repeats earlier passes and has no square Jacobian.
    output : {"logits", "hidden"}
        What a rollout returns.
    state_is_random : bool
        Whether the initial state is drawn, so that pairing of runs matters.
    fixed_depth : bool
        Whether the calls of a rollout depend on its depth alone, and not on its tokens.
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    checkpoints: ClassVar[tuple[tuple[str, int], ...]] = ()
    code: ClassVar[Literal["checkpoint", "transformers", "own"]] = "transformers"
    transformers: ClassVar[str] = ""
    also: ClassVar[str] = ""
    exposed: ClassVar[tuple[str, ...]] = ()
    idle: ClassVar[tuple[str, ...]] = ()
    model_types: ClassVar[tuple[str, ...]] = ()
    has_steps: bool = False
    grows: bool = False
    output: Output = "logits"
    state_is_random: bool = False
    fixed_depth: bool = True

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @classmethod
    @abstractmethod
    def matches(cls, model: nn.Module) -> bool:
        """Whether this adapter fits the model, judged by its configuration and structure."""

    @classmethod
    def model_class(cls) -> ModelClass | None:
        """Build rule for a checkpoint if its ``config.json`` does not name the class. None if it does."""
        return None

    @property
    @abstractmethod
    def n_steps(self) -> int:
        """Depth of the deployed model."""

    @abstractmethod
    def shared_parameters(self, n_steps: int) -> tuple[SharedParameter, ...]:
        """Shared weights, ordered by first invocation."""

    @abstractmethod
    def rollout(self, batch: Batch, n_steps: int) -> Tensor:
        """Run one rollout at a fixed depth, without cache, and without gradient unless `keeps_graph`.

        Parameters
        ----------
        batch : Batch
            Prompts. Their seeds fix the initial states.
        n_steps : int
            Depth.

        Returns
        -------
        Tensor, shape (n_prompts, n_tokens, vocabulary or width)
            Logits, or hidden states as given by `output`.
        """

    def prompt_ids(self, ids: Sequence[int]) -> list[int]:
        """Return the ids of a prompt with the marks that the model needs before it answers."""
        return list(ids)

    def extend(self, batch: Batch, n_steps: int, n_seen: int, cache: Any) -> tuple[Tensor, Any] | None:
        """Continue a rollout with the model's key/value cache, one for each step of the loop.

        Parameters
        ----------
        batch : Batch
            All tokens so far.
        n_steps : int
            Depth.
        n_seen : int
            Number of tokens in the cache.
        cache : object or None
            Second result of the last call. None at first.

        Returns
        -------
        logits : Tensor of shape (n_prompts, n_tokens - n_seen, vocabulary)
            Logits of the tokens that are not in the cache.
        cache : object
            Cache of all tokens. The method returns None instead of the pair if the model has no cache.
        """
        return None

    @property
    def served_by_cache(self) -> bool:
        """Whether engines return the logits of the model's cache even if a rollout without it differs."""
        return False

    def program(self, n_steps: int) -> Program | None:
        """Describe the model as a program for text generation on the processor. None if this is not possible."""
        return None

    def exit_rule(self) -> ExitRule | None:
        """Return the model's early-exit rule, new for each token. None if it has no rule."""
        return None

    @property
    def keeps_graph(self) -> bool:
        """Whether `rollout` keeps the graph for gradients: inside a block of `differentiable`, in its thread."""
        return getattr(_GRAPH, "kept", False)

    @contextlib.contextmanager
    def differentiable(self) -> Iterator[None]:
        """Keep the graph of this thread's rollouts for gradients inside the block."""
        before, _GRAPH.kept = self.keeps_graph, True
        try:
            yield
        finally:
            _GRAPH.kept = before

    def left_out(self) -> dict[str, str]:
        """Parameters that the loop uses but `shared_parameters` does not list: name and reason.

        Some are used without a call of their module, so that no hook sees their input. Others are not matrices, or do
        not affect the output.
        """
        return {}

    def missed(self) -> dict[str, str]:
        """Entries of `left_out` that a user may expect to be quantized. Their input cannot be observed."""
        return {}

    def look(self, batch: Batch) -> None:  # noqa: B027  # Most adapters declare their loop.
        """Receive the prompts of a later run. Adapters that discover the loop by a run use them."""

    def describe_loop(self) -> tuple[str, ...]:
        """Lines on the discovered loop. Empty where the adapter declares it."""
        return ()

    def n_updates(self, n_steps: int) -> int:
        """Number of `step` calls before `predict` in a rollout of depth `n_steps`.

        It is `n_steps`, unless the readout is itself the last pass through the loop's weights.
        """
        return n_steps

    def embed(self, batch: Batch) -> Any:
        """Second input of every step besides the state (the prelude's output), or None."""
        raise self._no_steps()

    def initial_state(self, batch: Batch, embedding: Any) -> Tensor:
        """State before step 0."""
        raise self._no_steps()

    def step(self, state: Tensor, embedding: Any, t: int, n_steps: int) -> Tensor:
        """State after step t of n_steps."""
        raise self._no_steps()

    def predict(self, state: Tensor, embedding: Any) -> Tensor:
        """Output read from a state."""
        raise self._no_steps()

    def _no_steps(self) -> SystemContractError:
        return SystemContractError(f"system {self.name!r} has no single-step function")

    @property
    def prompt_length(self) -> int | None:
        """Required number of tokens of every prompt, or None for any number."""
        return None

    def check_depth(self, n_steps: int) -> int:
        """Return `n_steps` if a rollout can have this depth, else raise `ConfigError`."""
        if n_steps < 1:
            raise ConfigError(f"n_steps must be at least 1; got {n_steps}")
        if n_steps > MAX_STEPS:
            raise ConfigError(f"n_steps must be at most {MAX_STEPS}; got {n_steps}")
        return n_steps

    def parameter(self, shared: SharedParameter) -> nn.Parameter:
        """Return the parameter object that `shared` names."""
        if not shared.owners:
            return self.weight(shared.name)
        found: nn.Parameter = self.model.get_submodule(shared.owners[0]).weight
        return found

    def weight(self, name: str) -> nn.Parameter:
        """Return the parameter that `SharedParameter.name` names."""
        found: nn.Parameter = self.model.get_parameter(names_of(self.model).in_model(name))
        return found

    @property
    def device(self) -> torch.device:
        """Device of the model's parameters."""
        return next(self.model.parameters()).device

    def to_device(self, tensor: Tensor, dtype: bool = False) -> Tensor:
        """Move a tensor to the model's device and, if requested, to its floating type."""
        first = next(self.model.parameters())
        return tensor.to(first.device, first.dtype) if dtype else tensor.to(first.device)


@contextlib.contextmanager
def model_code(where: str | Callable[[], str], error: type[LoopqError] = CalibrationError) -> Iterator[None]:
    """Run code of a model inside the block. Its errors become one line that names the place.

    Raises
    ------
    LoopqError
        Has the given class and wraps any error of the model's code. Errors of loopq and of memory pass unchanged.
    """
    try:
        yield
    except (LoopqError, MemoryError):
        raise
    except Exception as cause:
        first = next(iter(str(cause).strip().splitlines()), "")
        hint = "; take fewer or shorter prompts at once (--batch-size, --seq-len)" * ("memory" in first)
        place = where if isinstance(where, str) else where()
        raise error(f"{place}: the model raises {type(cause).__name__}: {first:.300}{hint}") from cause


def find_prefix(model: nn.Module, marker: str) -> str | None:
    """Return the prefix of the module name `marker` ("", "gpt.", ...), or None without such a module.

    Published classes often wrap the paper's model again, which adds a prefix to every name.
    """
    for name, _ in model.named_modules(remove_duplicate=False):
        if name == marker or name.endswith("." + marker):
            return str(name).removesuffix(marker)
    return None


def logits_of(output: Any) -> Tensor:
    """Take the logits out of the output of a model's forward.

    Raises
    ------
    SystemContractError
        If the model kept a cache, so its next call would continue this rollout, or gave no logits.
    """
    if cache_of(output) is not None:
        raise SystemContractError(
            f"{type(output).__name__}: the forward kept a cache; rollouts run with use_cache=False"
        )
    return _logits(output)


def cache_of(output: Any) -> Any:
    """Take the cache out of a forward's output. None if it kept none."""
    name = next((name for name in _CACHES if hasattr(output, name)), "")
    return getattr(output, name, None)


def cache_name(forward: Callable[..., Any]) -> str | None:
    """Name of a forward's cache argument. None if it has none."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in _CACHES if name in parameters), None)


def cached(output: Any) -> tuple[Tensor, Any]:
    """Take the logits and the cache out of the output of a forward with ``use_cache=True``.

    Raises
    ------
    SystemContractError
        If the model kept no cache, or gave no logits.
    """
    cache = cache_of(output)
    if cache is None:
        raise SystemContractError(f"{type(output).__name__}: the forward kept no cache")
    return _logits(output), cache


def past(module: nn.Module, cache: Any) -> dict[str, Any]:
    """Arguments of a forward that starts or continues a cache."""
    return (
        {"use_cache": True} if cache is None else {"use_cache": True, str(cache_name(module.forward)): cache}
    )


def _logits(output: Any) -> Tensor:
    logits = output["logits"] if isinstance(output, dict) else getattr(output, "logits", output)
    if isinstance(logits, tuple):
        logits = logits[0]
    if not hasattr(logits, "shape") or logits.ndim != 3:
        raise SystemContractError(
            f"{type(output).__name__}: no logits (n_prompts, n_tokens, vocabulary) in it"
        )
    found: Tensor = logits
    return found


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


def routing_module(model: nn.Module, name: str, layer: str = "") -> str | None:
    """Name of the module that holds this module in a list of experts (`nn.ModuleList`). None without such a list.

    Parameters
    ----------
    model : nn.Module
        The whole model.
    name : str
        Name of the module.
    layer : str
        Module around it. Lists that also hold this one are not lists of experts.
    """
    from torch import nn  # lazy: loopq imports without torch

    def is_list(module: str) -> bool:
        return module != layer and isinstance(model.get_submodule(module), nn.ModuleList)

    while name != layer:
        name = name.rpartition(".")[0]
        if is_list(name):
            while is_list(name):
                name = name.rpartition(".")[0]
            return name
    return None


def gates(model: nn.Module, routing: Iterable[str]) -> dict[str, str]:
    """Weights that choose or weigh experts, with the reason why they stay unchanged.

    Parameters
    ----------
    model : nn.Module
        The whole model.
    routing : iterable of str
        Modules that choose experts. A child besides the experts is a gate if it has one output, or one per expert.
    """
    from torch import nn  # lazy: loopq imports without torch

    found = {}
    for name in routing:
        block = model.get_submodule(name)
        n_experts = max((len(m) for m in block.children() if isinstance(m, nn.ModuleList)), default=0)
        for child, module in block.named_children():
            weight = module._parameters.get("weight")
            if weight is not None and weight.ndim == 2 and weight.shape[0] in (1, n_experts):
                found[f"{name}.{child}.weight".lstrip(".")] = "a gate, which chooses or weighs experts"
    return found


def stacked_experts(model: nn.Module) -> dict[str, str]:
    """Experts stored in three-dimensional tensors that no module is called with, with advice."""
    return {
        name: "experts in one tensor of three dimensions: `loopq.systems.experts.unfuse(model)` takes apart those of "
        "classes of transformers 5 that use its interface of experts; no other layout can be quantized"
        for name, parameter in model.named_parameters()
        if parameter.ndim == 3 and name.rpartition(".")[0].endswith("experts")
    }


def declare(
    model: nn.Module,
    modules: Iterable[tuple[str, dict[str, Any]]],
    invocations: int,
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
