"""What every looped system declares: its rollout, its shared parameters and, where it has one, its step.

A *rollout* is everything the model does for a batch of prompts from the initial state to the output. An
*invocation* is one call of a shared parameter's module within it, and step t of a parameter is its t-th
invocation. Parameters are identified by object, not by name, since systems tie one weight to several modules.
"""

from __future__ import annotations

import contextlib
import inspect
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


@dataclass(frozen=True)
class ModelClass:
    """How a model is built from its ``config.json`` and filled from its files.

    Parameters
    ----------
    build : callable
        Takes the contents of ``config.json``, gives the model with any weights.
    encode : callable, optional
        Text to token ids, for folders without a tokenizer.
    rename : callable, optional
        Takes the stored tensors by name, gives them under the model's own names.
    """

    build: Callable[[dict[str, Any]], nn.Module]
    encode: Encode | None = None
    rename: Callable[[Tensors], Tensors] | None = None


@dataclass(frozen=True)
class Batch:
    """Prompts of one length that run together.

    Parameters
    ----------
    input_ids : Tensor, int64, shape (n_prompts, n_tokens)
        Token ids, without padding.
    prompts : tuple of int
        Number of each prompt within the whole data set; with `seed` it fixes the prompt's initial state, so
        that batching changes nothing about it.
    seed : int
        Seed of the initial states.
    by_token : bool
        Draw the noise of every token from a generator of its own, so that a token starts from the same state however
        many follow, as a text that is being generated needs it.
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
        """Draw Gaussian noise, prompt by prompt, from generators of its own.

        Parameters
        ----------
        *shape : int
            Shape for one prompt, tokens first.
        std : float
            Standard deviation.
        cut : float, optional
            Draw from the normal distribution truncated at +- `cut` standard deviations.
        first : int
            Leave out the tokens before this one.

        Returns
        -------
        Tensor, float32, shape ``(n_prompts, *shape)``, tokens without those left out, on the CPU
            The same numbers for a prompt in whatever batch it runs; the global generator is not touched.
        """
        import torch  # lazy: loopq imports without torch

        def draw(number: int, size: tuple[int, ...]) -> Tensor:
            generator = torch.Generator().manual_seed(number % (1 << 63))
            # Named, since the defaults of torch are whatever the program around has set.
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
        Names of all modules that hold this very parameter, the first owner first; none where no module is called with
        it, so that its products are watched.
    in_features, out_features : int
        Input and output width of the product.
    orientation : {"out_in", "in_out", "table", "conv"}
        How the weight is stored: as of `nn.Linear`, transposed as of GPT-2's `Conv1D`, as rows that are looked up, or
        with a third axis of length 1 as of `nn.Conv1d`.
    invocations : int
        Calls in one rollout at the depth asked for.
    role : str
        What the layer is, in the field's words: "adapter", "attention", "mlp", "modulation", "head", ...
    exposed : bool
        No identity path leads around it: its error is fed back into the loop whole.
    treatment : {"gptq", "rtn", "dense"}
        What is done by default: calibrated; rounded by the paper's methods and calibrated by others
        (`Method.rounds_as_published`); or left as it is.
    reason : str
        Why, where the treatment is not "gptq".
    fused : str
        Blocks of output rows that one weight holds, in order, joined by "+" ("q+k+v", "gate+up"); "/head" at
        the end says that they repeat head by head. Empty where the weight is one projection.
    routed_in : str
        Of an expert: the module that chooses which of its rows go to which expert. Its calls are the steps then, and
        `invocations` counts them; a step may give the expert any number of rows, or none.
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
        """View what the model stores as this weight, or its gradient, in shape (out_features, in_features)."""
        plain = stored[..., 0] if self.orientation == "conv" else stored
        return plain.T if self.orientation == "in_out" else plain

    def __post_init__(self) -> None:
        """Refuse a name that cannot stand for a file, as it does in a dump and while layers are solved."""
        checked(Name, self.name, "parameter", SystemContractError)


class LoopedSystem(ABC):
    """Adapter of one kind of looped model.

    A subclass registers itself under its name in `loopq.systems.SYSTEMS`. It takes the model as it is, in
    whatever precision and on whatever device, and changes nothing about it.

    Parameters
    ----------
    model : nn.Module
        The model, in eval mode.

    Attributes
    ----------
    name : str
        Name in the registry.
    summary : str
        The loop in one line, for `loopq systems`.
    checkpoints : tuple of (str, int)
        Published models of this kind and how many of their weights are quantized by default.
    code : {"checkpoint", "transformers", "own"}
        Where the class of the published models comes from: the checkpoint itself, transformers, or neither.
    transformers : str
        Versions that their class needs, where these are not the usual ones.
    also : str
        What else they need, in words.
    exposed : tuple of str
        Layers that no identity path leads around, in words.
    idle : tuple of str
        Beginnings of names of parameters that no rollout uses: a checkpoint may lack them.
    model_types : tuple of str
        ``model_type`` of each ``config.json`` whose class `model_class` builds.
    has_steps : bool
        Whether `embed`, `initial_state`, `step` and `predict` are there; diagnoses that intervene in the
        loop need them.
    output : {"logits", "hidden"}
        What a rollout returns.
    state_is_random : bool
        Whether the initial state is drawn, so that pairing of runs matters.
    keeps_graph : bool
        Whether `rollout` keeps what gradients need; set by `differentiable`, and read by every `rollout`.
    interleaves : bool
        Whether a `rollout` at the model's own depth changes nothing of the model for a while, so that several can run
        in turns, a layer each.
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
    output: Output = "logits"
    state_is_random: bool = False
    keeps_graph: bool = False
    interleaves: bool = False

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @classmethod
    @abstractmethod
    def matches(cls, model: nn.Module) -> bool:
        """Whether this adapter fits the model, told by its configuration and structure."""

    @classmethod
    def model_class(cls) -> ModelClass | None:
        """How to build a checkpoint whose ``config.json`` does not tell its class; None where it does."""
        return None

    @property
    @abstractmethod
    def n_steps(self) -> int:
        """Depth the model is deployed at."""

    @abstractmethod
    def shared_parameters(self, n_steps: int) -> tuple[SharedParameter, ...]:
        """Shared weights in the order of their first invocation."""

    @abstractmethod
    def rollout(self, batch: Batch, n_steps: int) -> Tensor:
        """Run one rollout at a fixed depth, without cache, and without gradient unless `keeps_graph`.

        Parameters
        ----------
        batch : Batch
            Prompts; their seeds fix the initial states.
        n_steps : int
            Depth.

        Returns
        -------
        Tensor, shape (n_prompts, n_tokens, vocabulary or width)
            Logits, or hidden states where `output` says so.
        """

    def prompt_ids(self, ids: Sequence[int]) -> list[int]:
        """Return the ids of a prompt with what the model needs after it before it answers."""
        return list(ids)

    def extend(self, batch: Batch, n_steps: int, n_seen: int, cache: Any) -> tuple[Tensor, Any] | None:
        """Go on with a rollout by the model's own cache of keys and values, one for each step of the loop.

        Parameters
        ----------
        batch : Batch
            All tokens so far.
        n_steps : int
            Depth.
        n_seen : int
            Tokens that the cache holds.
        cache : object or None
            What the last call returned; None at first.

        Returns
        -------
        logits : Tensor, shape (n_prompts, n_tokens - n_seen, vocabulary)
            Of the tokens that the cache does not hold.
        cache : object
            That of all tokens. None instead of the pair: the model has no cache.
        """
        return None

    @property
    def served_by_cache(self) -> bool:
        """Whether engines give the logits of the model's cache even where a rollout without it has others."""
        return False

    def program(self, n_steps: int) -> Program | None:
        """Describe the model as a program of the core, which generates text on the processor; None where it is none."""
        return None

    def exit_rule(self) -> ExitRule | None:
        """Return the model's own rule for leaving the loop early, new for each token; None where it has none."""
        return None

    @contextlib.contextmanager
    def differentiable(self) -> Iterator[None]:
        """Let rollouts keep what gradients need inside the block."""
        before, self.keeps_graph = self.keeps_graph, True
        try:
            yield
        finally:
            self.keeps_graph = before

    def left_out(self) -> dict[str, str]:
        """Parameters that the loop uses but `shared_parameters` does not list: name and reason.

        Those are used without a call of their module, so that no hook sees their input, are no matrices, or
        have no part in the output.
        """
        return {}

    def missed(self) -> dict[str, str]:
        """Those of `left_out` that a user may expect to be quantized: their input cannot be seen."""
        return {}

    def look(self, batch: Batch) -> None:  # noqa: B027  # Most adapters declare their loop.
        """Take note of prompts that are to be run: an adapter that finds the loop by a run finds it by these."""

    def describe_loop(self) -> tuple[str, ...]:
        """Lines on the loop where a run found it; nothing where the adapter declares it."""
        return ()

    def n_updates(self, n_steps: int) -> int:
        """Times `step` runs before `predict` in a rollout of depth `n_steps`.

        It is `n_steps` except where reading out the state is itself the last pass through the loop's weights.
        """
        return n_steps

    def embed(self, batch: Batch) -> Any:
        """What every step is given besides the state (the prelude's output), or None."""
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
        """Number of tokens that every prompt must have, or None where any will do."""
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
        """Move a tensor to the model's device and, if asked, to its floating type."""
        first = next(self.model.parameters())
        return tensor.to(first.device, first.dtype) if dtype else tensor.to(first.device)


@contextlib.contextmanager
def model_code(where: str | Callable[[], str], error: type[LoopqError] = CalibrationError) -> Iterator[None]:
    """Run code of a model inside the block: what it raises becomes one line that says where it was.

    Raises
    ------
    LoopqError
        Of the class given: whatever the model's own code raised. Errors of loopq, and of memory, pass as they are.
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
    """Return what stands before the module name `marker` ("", "gpt.", ...), or None without such a module.

    Published classes often wrap the model of the paper once more, which puts a word before every name.
    """
    for name, _ in model.named_modules(remove_duplicate=False):
        if name == marker or name.endswith("." + marker):
            return str(name).removesuffix(marker)
    return None


@contextlib.contextmanager
def setting(target: Any, **values: Any) -> Iterator[None]:
    """Give attributes of an object other values inside the block and their own ones after it."""
    missing = object()
    before = {name: vars(target).get(name, missing) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is missing:
                delattr(target, name)
            else:
                setattr(target, name, value)


def logits_of(output: Any) -> Tensor:
    """Take the logits out of whatever a model's forward returns.

    Raises
    ------
    SystemContractError
        The model kept a cache, so its next call would not be a rollout of its own, or gave no logits.
    """
    if cache_of(output) is not None:
        raise SystemContractError(
            f"{type(output).__name__}: the forward kept a cache; rollouts run with use_cache=False"
        )
    return _logits(output)


def cache_of(output: Any) -> Any:
    """Take the cache out of what a forward returns; None where it kept none."""
    name = next((name for name in _CACHES if hasattr(output, name)), "")
    return getattr(output, name, None)


def cache_name(forward: Callable[..., Any]) -> str | None:
    """Name under which a forward takes its cache; None where it takes none."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in _CACHES if name in parameters), None)


def cached(output: Any) -> tuple[Tensor, Any]:
    """Take the logits and the cache out of what a forward with ``use_cache=True`` returns.

    Raises
    ------
    SystemContractError
        The model kept no cache, or gave no logits.
    """
    cache = cache_of(output)
    if cache is None:
        raise SystemContractError(f"{type(output).__name__}: the forward kept no cache")
    return _logits(output), cache


def past(module: nn.Module, cache: Any) -> dict[str, Any]:
    """Arguments of a forward that is to go on from a cache, or to begin one."""
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
    """Whether the weight of a module is also that of an embedding, so that rounding it rounds the inputs."""
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
    """Name of the module whose list of experts (`nn.ModuleList`) a module stands in; None where it stands in none.

    Parameters
    ----------
    model : nn.Module
        The whole model.
    name : str
        Name of the module.
    layer : str
        Module around it: lists that hold this one too are none of experts.
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
    """Weights by which modules choose experts or weigh them, and why they stay as they are.

    Parameters
    ----------
    model : nn.Module
        The whole model.
    routing : iterable of str
        Modules that choose experts. What stands in them beside the experts and has an output for each, or one alone, is
        a gate.
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
    """Experts that a model keeps in tensors of three dimensions, which no module is called with, and what to do."""
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
    """Declare the weights of the modules named, each parameter once.

    Parameters
    ----------
    model : nn.Module
        The whole model.
    modules : iterable of (str, dict)
        Module name and the fields of `SharedParameter` that differ from the defaults; "role" is required.
    invocations : int
        Calls in one rollout, unless a module's fields say otherwise.

    Raises
    ------
    SystemContractError
        A module that is missing, or whose weight is not a matrix.
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
