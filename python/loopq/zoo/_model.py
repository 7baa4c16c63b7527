"""What every zoo model has: a JSON-able config, exact save and load, and the rollout as public steps."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from loopq.errors import CheckpointError, ConfigError

WEIGHTS_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
# Blocks before and after the loop; a model may do without.
_MAY_BE_ZERO = ("n_prelude", "n_coda")


@dataclasses.dataclass
class ZooConfig:
    """Settings that every zoo model has.

    Parameters
    ----------
    vocab_size : int
        Number of token ids; 256, since the zoo reads bytes.
    n_embd : int
        Width ``d`` of the state.
    n_heads : int
        Attention heads.
    intermediate_size : int
        Hidden width of the MLP.
    n_steps : int
        Depth ``N`` of a rollout when the caller names none.
    block_size : int
        Longest sequence the model was trained on.
    norm_eps : float
        Added to the mean square inside the norms.
    """

    model_type: ClassVar[str] = ""
    # What a kind asks of its integers: the least value where it is not 1, (setting, factor, other) for "a
    # multiple of factor times other", and whether there is a depth to choose.
    least: ClassVar[dict[str, int]] = {}
    multiples: ClassVar[tuple[tuple[str, int, str | None], ...]] = (("n_embd", 1, "n_heads"),)
    looped: ClassVar[bool] = True

    vocab_size: int = 256
    n_embd: int = 128
    n_heads: int = 4
    intermediate_size: int = 384
    n_steps: int = 8
    block_size: int = 128
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        least = {
            f.name: 0 if f.name in _MAY_BE_ZERO else 1 for f in dataclasses.fields(self) if f.type == "int"
        }
        for name, low in (least | self.least).items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ConfigError(
                    f"{self.model_type}: {name} must be an integer of at least {low}, got {value!r}"
                )
        for name, factor, other in self.multiples:
            unit = factor * (getattr(self, other) if other else 1)
            if getattr(self, name) % unit:
                raise ConfigError(
                    f"{self.model_type}: {name} must be a multiple of {unit}"
                    f"{f' ({factor} * {other})' if other else ''}, got {getattr(self, name)}"
                )
        if not self.looped and self.n_steps != 1:
            raise ConfigError(
                f"{self.model_type}: there is no loop over depth, so n_steps must be 1, got {self.n_steps}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain JSON values, ``model_type`` included."""
        return {"model_type": self.model_type, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build the config from what `to_dict` gave.

        Raises
        ------
        ConfigError
            If ``model_type`` is another model's or a key is unknown.
        """
        values = dict(values)
        model_type = values.pop("model_type", cls.model_type)
        if model_type != cls.model_type:
            raise ConfigError(f"config.json says model_type {model_type!r}, this class is {cls.model_type!r}")
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"{cls.model_type}: unknown settings {unknown}; known ones are {sorted(known)}")
        return cls(**values)


class ZooModel(nn.Module):
    """Base of the zoo: a rollout is embed, start state, ``N`` single steps, readout.

    A subclass sets `config_class` and gives the four step functions; `forward` chains them, so that the
    chained single steps are the rollout by construction.
    """

    config_class: ClassVar[type[ZooConfig]] = ZooConfig
    # Whether a shorter rollout is the beginning of a longer one; not so where steps know the depth.
    prefix_rollouts: ClassVar[bool] = True
    config: ZooConfig

    @classmethod
    def from_config(cls, config: ZooConfig | dict[str, Any]) -> Self:
        """Build an untrained model from a config object or from the dict of a ``config.json``."""
        if isinstance(config, dict):
            config = cls.config_class.from_dict(config)
        return cls(config)

    def embed_inputs(self, input_ids: Tensor) -> Tensor:
        """Return what the loop is fed with: float array (batch, seq, d)."""
        raise NotImplementedError

    def initialize_state(self, input_embeds: Tensor, seed: int | None = None, first_row: int = 0) -> Tensor:
        """Return the state before step 0: float array (batch, seq, d)."""
        raise NotImplementedError

    def iterate_one_step(
        self, input_embeds: Tensor, input_states: Tensor, step: int = 0, num_steps: int | None = None
    ) -> Tensor:
        """Return the state after one more step, ``R(s, e)``: float array (batch, seq, d)."""
        raise NotImplementedError

    def predict_from_latents(self, latents: Tensor) -> Tensor:
        """Return the logits read off a state: float array (batch, seq, vocab)."""
        raise NotImplementedError

    def check_inputs(self, input_ids: Tensor, num_steps: int | None) -> int:
        """Return the depth to run after checking ids and depth.

        Raises
        ------
        ConfigError
            If ``input_ids`` is not an integer array (batch, seq) or the depth is below 1.
        """
        if input_ids.ndim != 2 or input_ids.dtype.is_floating_point:
            raise ConfigError(
                f"input_ids must be an integer array (batch, seq), got {input_ids.dtype} "
                f"{tuple(input_ids.shape)}"
            )
        depth = self.config.n_steps if num_steps is None else num_steps
        if depth < 1:
            raise ConfigError(f"num_steps must be at least 1, got {depth}")
        return depth

    def forward(
        self,
        input_ids: Tensor,
        num_steps: int | None = None,
        init_state: Tensor | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """Run one rollout.

        Parameters
        ----------
        input_ids : int64 array (batch, seq)
            Byte values.
        num_steps : int, optional
            Depth ``N``; the config's ``n_steps`` when absent.
        init_state : float array (batch, seq, d), optional
            State before step 0, for paired runs.
        seed : int, optional
            Seed of the start state where the model draws one; absent, the global generator is used.

        Returns
        -------
        float array (batch, seq, vocab)
            Logits of the next byte at every position, after the last step.
        """
        return self.rollout(input_ids, num_steps, init_state, seed)

    def rollout(
        self,
        input_ids: Tensor,
        num_steps: int | None = None,
        init_state: Tensor | None = None,
        seed: int | None = None,
        first_row: int = 0,
    ) -> Tensor:
        """Run `forward` on a part of a batch whose first row has index ``first_row`` in the whole."""
        return self.predict_from_latents(self.states(input_ids, num_steps, init_state, seed, first_row)[-1])

    def states(
        self,
        input_ids: Tensor,
        num_steps: int | None = None,
        init_state: Tensor | None = None,
        seed: int | None = None,
        first_row: int = 0,
    ) -> list[Tensor]:
        """Return the states ``s_0 .. s_N`` of one rollout, each (batch, seq, d)."""
        depth = self.check_inputs(input_ids, num_steps)
        embeds = self.embed_inputs(input_ids)
        states = [self.initialize_state(embeds, seed, first_row) if init_state is None else init_state]
        for step in range(self.n_updates(depth)):
            states.append(self.iterate_one_step(embeds, states[-1], step, depth))
        return states

    def n_updates(self, depth: int) -> int:
        """Return how many state updates a rollout of this depth makes; a readout may be the last step."""
        return depth

    def training_loss(self, ids: Tensor, num_steps: int) -> Tensor:
        """Return the mean loss in nats of predicting ``ids[:, 1:]`` (batch, seq) at depth ``num_steps``."""
        logits = self.forward(ids[:, :-1], num_steps)
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    def scored(
        self, ids: Tensor, num_steps: int | None = None, seed: int | None = None, first_row: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return what ``bits_per_byte`` scores: logits (batch, n, vocab) and targets (batch, n)."""
        return self.rollout(ids[:, :-1], num_steps, seed=seed, first_row=first_row), ids[:, 1:]

    def own_state(self) -> dict[str, Tensor]:
        """Return the state dict with every tied tensor once, under its first name."""
        seen: set[int] = set()
        own: dict[str, Tensor] = {}
        for name, tensor in self.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                own[name] = tensor.detach()
        return own

    def save(self, folder: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write ``model.safetensors`` and ``config.json`` into ``folder``, each by rename.

        Parameters
        ----------
        folder : path
            Made if it is absent.
        dtype : torch.dtype, optional
            Storage type; the weights as they are when absent. What is stored is the model: load it back
            before measuring anything.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {k: v.to(dtype or v.dtype).contiguous() for k, v in self.own_state().items()}
        with tempfile.TemporaryDirectory(dir=folder) as tmp:
            part = Path(tmp) / WEIGHTS_NAME
            save_file(tensors, part, metadata={"model_type": self.config.model_type})
            text = Path(tmp) / CONFIG_NAME
            text.write_text(json.dumps(self.config.to_dict(), indent=2) + "\n", encoding="utf-8")
            part.replace(folder / WEIGHTS_NAME)
            text.replace(folder / CONFIG_NAME)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Load a saved model in float32 and eval mode.

        Raises
        ------
        CheckpointError
            If a file is absent or unreadable, or names or shapes do not fit the config.
        """
        folder = Path(folder)
        try:
            config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
            tensors = load_file(folder / WEIGHTS_NAME)
        except (OSError, ValueError, SafetensorError) as exc:
            raise CheckpointError(
                f"{folder}: not a readable zoo model ({exc}); its files are {CONFIG_NAME} and "
                f"{WEIGHTS_NAME}: copy or train it again"
            ) from exc
        model = cls.from_config(config)
        own = model.own_state()
        wrong = sorted(set(own) ^ set(tensors)) or [k for k in own if own[k].shape != tensors[k].shape]
        if wrong:
            raise CheckpointError(f"{folder}: tensors do not fit the config: {wrong[:5]}")
        with torch.no_grad():
            for name, target in own.items():
                target.copy_(tensors[name])
        model.eval()
        return model
