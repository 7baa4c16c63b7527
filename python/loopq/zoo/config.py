"""Settings shared by small models of published classes, and their conversion from ``config.json``."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

from loopq.errors import ConfigError


@dataclasses.dataclass
class SmallConfig:
    """Settings of every small model. Attributes that adapters read keep the names of the published classes.

    Parameters
    ----------
    vocab_size : int
        Number of token ids. 256 for models of bytes.
    n_embd : int
        Width ``d`` of the state.
    n_heads : int
        Attention heads.
    intermediate_size : int
        Hidden width of the MLP.
    block_size : int
        Longest training sequence.
    norm_eps : float
        Added to the mean square inside the norms.

    Raises
    ------
    ConfigError
        If an integer is below its minimum or not a multiple of the required number.
    """

    model_type: ClassVar[str] = ""
    # Rules for integers: their minimum where it is not 1, and (setting, factor, other) for "a multiple of factor times
    # other".
    least: ClassVar[dict[str, int]] = {}
    multiples: ClassVar[tuple[tuple[str, int, str | None], ...]] = (("n_embd", 1, "n_heads"),)

    vocab_size: int = 256
    n_embd: int = 128
    n_heads: int = 4
    intermediate_size: int = 384
    block_size: int = 128
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        least = {f.name: 1 for f in dataclasses.fields(self) if f.type == "int"} | self.least
        for name, low in least.items():
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

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain JSON values, ``model_type`` included."""
        return {"model_type": self.model_type, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build the config from the output of `to_dict`.

        Raises
        ------
        ConfigError
            If ``model_type`` belongs to another model or a key is unknown.
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
