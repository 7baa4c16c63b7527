"""Interface of a looped system: its rollout and its shared parameters.

A *rollout* is everything the model does for a batch of prompts from the initial state to the output. An *invocation*
is one call of a shared parameter's module within it. Step t of a parameter is its t-th invocation. Parameters are
identified by object, not by name, since systems tie one weight to several modules.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from loopq.errors import ConfigError
from loopq.layers.loop_spec import MAX_STEPS

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from loopq.layers.shared import SharedParameter

Output = Literal["logits", "hidden"]
#: Whether the rollouts of a thread keep their graph.
_GRAPH = threading.local()


@dataclass(frozen=True)
class Call:
    """One call of a module that takes other inputs than token ids.

    Parameters
    ----------
    args : tuple
        Positional arguments, with tensors for arrays.
    kwargs : dict
        Keyword arguments.
    given : object
        The batch as the user gave it.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    given: Any

    def on(self, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return both kinds of arguments with all tensors on a device."""
        return _on(self.args, device), _on(dict(self.kwargs), device)


def _on(value: Any, device: torch.device) -> Any:
    if isinstance(value, Mapping):
        return {name: _on(v, device) for name, v in value.items()}
    if isinstance(value, tuple | list):
        parts = [_on(v, device) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value.to(device) if hasattr(value, "to") else value


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
    call : Call, optional
        The arguments of a module that takes no token ids. The ids then only tell the number of rows.
    """

    input_ids: Tensor
    prompts: tuple[int, ...]
    seed: int = 0
    by_token: bool = False
    call: Call | None = None

    @property
    def unit(self) -> str:
        """Word for a prompt in messages; calls are batches."""
        return "prompt" if self.call is None else "batch"

    @property
    def name(self) -> str:
        """The first prompt, for messages."""
        return f"{self.unit} {self.prompts[0]}"

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
class Published:
    """Facts about the published models of one kind.

    Parameters
    ----------
    checkpoints : mapping of str to int
        Their names, and the number of weights quantized by default.
    code : {"checkpoint", "transformers", "own"}
        Source of their class: the checkpoint itself, transformers, or neither.
    transformers : str
        Versions that their class needs, if these are not the usual ones.
    also : str
        Their other requirements, in words.
    exposed : tuple of str
        Layers without an identity path around them, in words.
    idle : tuple of str
        Name prefixes of parameters that no rollout uses. A checkpoint may lack them.
    """

    checkpoints: Mapping[str, int] = field(default_factory=dict)
    code: Literal["checkpoint", "transformers", "own"] = "transformers"
    transformers: str = ""
    also: str = ""
    exposed: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()


class LoopedSystem(ABC):
    """Adapter of one kind of looped model.

    A subclass registers itself under its name in `loopq.systems.SYSTEMS`. It takes the model in any precision and on
    any device, and does not change it. `loopq.systems.capabilities` lists what it may offer besides, and
    `loopq.systems.stepwise` has single steps.

    Parameters
    ----------
    model : nn.Module
        The model, in eval mode.

    Attributes
    ----------
    name : str
        Name in the registry.
    summary : str
        One-line description of the loop for `loopq check`.
    published : Published
        Published models of this kind.
    output : {"logits", "hidden"}
        What a rollout returns.
    state_is_random : bool
        Whether the initial state is drawn, so that pairing of runs matters.
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    published: ClassVar[Published] = Published()
    output: Output = "logits"
    state_is_random: bool = False

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @classmethod
    @abstractmethod
    def matches(cls, model: nn.Module) -> bool:
        """Whether this adapter fits the model, judged by its configuration and structure."""

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

    def left_out(self) -> dict[str, str]:
        """Parameters that the loop uses but `shared_parameters` does not list: name and reason.

        Some are used without a call of their module, so that no hook sees their input. Others are not matrices, or do
        not affect the output.
        """
        return {}

    def check_depth(self, n_steps: int) -> int:
        """Return `n_steps` if a rollout can have this depth, else raise `ConfigError`."""
        if n_steps < 1:
            raise ConfigError(f"n_steps must be at least 1; got {n_steps}")
        if n_steps > MAX_STEPS:
            raise ConfigError(f"n_steps must be at most {MAX_STEPS}; got {n_steps}")
        return n_steps

    @property
    def keeps_graph(self) -> bool:
        """Whether `rollout` keeps the graph for gradients: inside a block of `differentiable`, in its thread."""
        return getattr(_GRAPH, "kept", False)

    @property
    def device(self) -> torch.device:
        """Device of the model's parameters."""
        return next(self.model.parameters()).device

    def to_device(self, tensor: Tensor, dtype: bool = False) -> Tensor:
        """Move a tensor to the model's device and, if requested, to its floating type."""
        first = next(self.model.parameters())
        return tensor.to(first.device, first.dtype) if dtype else tensor.to(first.device)


@contextlib.contextmanager
def differentiable(system: LoopedSystem) -> Iterator[None]:
    """Keep the graph of this thread's rollouts for gradients inside the block."""
    before, _GRAPH.kept = system.keeps_graph, True
    try:
        yield
    finally:
        _GRAPH.kept = before
