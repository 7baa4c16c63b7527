"""Optional capabilities of a system. A system has one if it defines its members; `isinstance` tells.

Single steps are a class of their own: `loopq.systems.stepwise.SingleSteps`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from loopq.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from loopq.systems.base import Batch
    from loopq.systems.program import Program

#: Text to token ids.
Encode = Callable[[str], Sequence[int]]
Tensors: TypeAlias = "dict[str, Tensor]"
#: Takes the state after a step and the logits read from it, (width) and (vocabulary) of one token, and a threshold.
ExitRule: TypeAlias = "Callable[[Tensor, Tensor, float], bool]"


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
    model_types : tuple of str
        ``model_type`` in every ``config.json`` that it supports.
    """

    build: Callable[[dict[str, Any]], nn.Module]
    encode: Encode | None = None
    rename: Callable[[Tensors], Tensors] | None = None
    model_types: tuple[str, ...] = ()


@runtime_checkable
class Builds(Protocol):
    """Builds models whose ``config.json`` does not name their class."""

    @classmethod
    def model_class(cls) -> ModelClass:
        """Build rule for its `model_types`, and for any folder that the user opens with this system."""


@runtime_checkable
class Continues(Protocol):
    """Continues a rollout with the model's key/value cache."""

    def extend(self, batch: Batch, n_steps: int, n_seen: int, cache: Any) -> tuple[Tensor, Any] | None:
        """Continue a rollout with a cache that has one part for each step of the loop.

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
            Cache of all tokens. The method returns None instead of the pair if this model has no cache.
        """


def extended(system: object, batch: Batch, n_steps: int, n_seen: int, cache: Any) -> tuple[Tensor, Any]:
    """Return what `Continues.extend` does. A system without a cache is refused with a ConfigError."""
    result = system.extend(batch, n_steps, n_seen, cache) if isinstance(system, Continues) else None
    if result is None:
        raise ConfigError("the model has no cache")
    return result


@runtime_checkable
class ServedByCache(Protocol):
    """Differs between its cache and a rollout."""

    @property
    def served_by_cache(self) -> bool:
        """Whether engines return the logits of the model's cache even if a rollout without it differs."""


@runtime_checkable
class Programmed(Protocol):
    """Runs on the processor without the model's modules."""

    def program(self, n_steps: int) -> Program | None:
        """Describe the model as a program for text generation. None if this is not possible."""


@runtime_checkable
class Exits(Protocol):
    """Can leave the loop early."""

    def exit_rule(self) -> ExitRule:
        """Return the model's early-exit rule, new for each token."""


@runtime_checkable
class Marks(Protocol):
    """Needs marks in a prompt."""

    def prompt_ids(self, ids: Sequence[int]) -> list[int]:
        """Return the ids of a prompt with the marks that the model needs before it answers."""


def marked(system: object, ids: Sequence[int]) -> list[int]:
    """Return the ids of a prompt, with marks if the system needs them."""
    return system.prompt_ids(ids) if isinstance(system, Marks) else list(ids)


@runtime_checkable
class FixedLength(Protocol):
    """Takes prompts of one length."""

    @property
    def prompt_length(self) -> int:
        """Required number of tokens of every prompt."""


@runtime_checkable
class Describes(Protocol):
    """Has more to say of its loop."""

    def describe_loop(self) -> tuple[str, ...]:
        """Lines on the loop, for the user."""


@runtime_checkable
class TakesCalls(Protocol):
    """Runs a module on any arguments of a call (`Batch.call`)."""

    def answer(self, batch: Batch, n_steps: int | None = None) -> Any:
        """Return what the module returns for the call of a batch."""

    def n_rows(self, batch: Batch) -> int:
        """Look at a call, and return the most rows that a looped layer reads in a step."""


@runtime_checkable
class Discovers(Protocol):
    """Discovers the loop by a run. The calls of a rollout may depend on its tokens, not on its depth alone."""

    def look(self, batch: Batch) -> None:
        """Receive the prompts of a later run."""

    def missed(self) -> dict[str, str]:
        """Entries of `left_out` that a user may expect to be quantized. Their input cannot be observed."""
