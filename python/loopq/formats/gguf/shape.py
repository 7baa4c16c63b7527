"""Base of llama.cpp's architectures: tensor names, and order of rows and layers. Spec: docs/formats/gguf.md."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from loopq.errors import CheckpointError
from loopq.formats.fused import cut
from loopq.formats.hf_folder import CONFIG
from loopq.layers.loop_spec import LOOP, PREFIX, layer_order
from loopq.settings.registry import Registry
from loopq.storage.files import RawTensor
from loopq.storage.schema import checked, parse_json, shown

ARCHITECTURES: Registry[type[Shape]] = Registry("architecture", "loopq.formats.gguf")
#: Modules of a layer that is Llama's, or nearly.
MODULES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.gate_proj": "attn_gate", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
_OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
#: Keys of config.json without which no file has a header.
_NEEDED = (
    "vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers", "intermediate_size",
    "num_attention_heads",
)  # fmt: skip
#: Keys of config.json that change what a decoder computes and that no header has, with the values that llama.cpp
#: computes with. An absent key is such a value, and so is null. Each entry of a list is looked up.
FIXED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"), "hidden_activation": ("silu", "swish"), "use_sliding_window": (False,),
    "is_causal": (True,), "partial_rotary_factor": (1,), "rotary_pct": (1,), "embedding_multiplier": (1,),
    "attention_multiplier": (), "residual_multiplier": (1,), "logits_scaling": (1,), "logit_scale": (1,),
    "final_logit_softcapping": (), "attn_logit_softcapping": (), "query_pre_attn_scalar": (), "clip_qkv": (),
    "use_qk_norm": (False,), "qk_layernorm": (False,), "no_rope_layers": (), "alibi": (False,),
    "num_experts": (0, 1), "num_local_experts": (0, 1), "n_routed_experts": (0, 1),
}  # fmt: skip
#: Values in a plain rotary setting.
_PLAIN_ROTARY: Mapping[str, tuple[Any, ...]] = {
    "rope_type": ("default",), "type": ("default",), "partial_rotary_factor": (1,)
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A model of one architecture. Each is a file of `loopq.formats.gguf`.

    Parameters
    ----------
    config : mapping
        The model's config.json.

    Attributes
    ----------
    name : str
        llama.cpp's name.
    classes : tuple of str
        Names in "architectures" of config.json.
    needed : tuple of str
        Keys of config.json that the header needs, besides those of all architectures.
    fixed : mapping of str to tuple
        Keys with one meaning in llama.cpp, and their values (`FIXED`).
    modules : mapping of str to str
        Modules of a layer, and llama.cpp's names.
    fused : mapping of str to tuple of str
        Modules of the model's files that hold several of the model, by rows in this order.
    pairs : bool
        Whether llama.cpp rotates neighbours in a head, while transformers rotates the halves.
    period : int
        Blocks after which the kinds of blocks repeat.
    loops_key : str
        Key of the header with the number of loops. Empty if no key alone has it.
    notes : tuple of str
        Lines for the user about the file.
    """

    config: Mapping[str, Any]

    name: ClassVar[str]
    classes: ClassVar[tuple[str, ...]]
    needed: ClassVar[tuple[str, ...]] = ("rms_norm_eps",)
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = FIXED
    modules: ClassVar[Mapping[str, str]] = MODULES
    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    pairs: ClassVar[bool] = True
    period: ClassVar[int] = 1
    loops_key: ClassVar[str] = ""
    notes: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def read(side_files: Mapping[str, bytes]) -> Shape:
        """Read the config.json among the files of a checkpoint or a dump. See `of`."""
        config = parse_json(side_files.get(CONFIG, b"{}"), CONFIG, finite=False)
        return Shape.of(checked(dict[str, Any], config, CONFIG))

    @staticmethod
    def of(config: Mapping[str, Any]) -> Shape:
        """Read the settings of a config.json.

        Raises
        ------
        CheckpointError
            If llama.cpp does not support the architecture, or the file cannot store a setting.
        """
        names = config.get("architectures") or []
        known = {one: kind for _, kind in ARCHITECTURES for one in kind.classes}
        dense = [str(n).removeprefix(PREFIX) for n in names]
        shape = next((known[n] for n in dense if n in known), None)
        if shape is None:
            raise CheckpointError(
                f"config.json: architectures {names}; of models that llama.cpp runs, loopq writes GGUF for "
                f"{', '.join(sorted(known))}"
            )
        fitting = shape.fitting(config)
        fitting.check_function()
        return fitting

    @classmethod
    def fitting(cls, config: Mapping[str, Any]) -> Shape:
        """Return the shape of a config.json with one of `classes`. An architecture may give it to another one."""
        return cls(config)

    def check_function(self) -> None:
        """Refuse a config.json with which llama.cpp would compute another function without an error.

        Raises
        ------
        CheckpointError
            The message names the key, and the values that the architecture of llama.cpp computes with.
        """
        for key, allowed in self.fixed.items():
            self._check_value(key, self.config.get(key), allowed)
        for place in ("rope_scaling", "rope_parameters"):
            for name, rope in self.rotary(place).items():
                for key, allowed in _PLAIN_ROTARY.items():
                    self._check_value(f"{name}: {key}", rope.get(key), allowed)

    def rotary(self, place: str) -> dict[str, Mapping[str, Any]]:
        """Return the rotary settings under a key of config.json by their name: one, or one for each kind of layer."""
        given = self.config.get(place) or {}
        if not isinstance(given, Mapping):
            raise CheckpointError(f"config.json: {place} is {shown(given)}; allowed: an object")
        kinds = {f"{place}: {kind}": part for kind, part in given.items() if isinstance(part, Mapping)}
        return kinds or {place: given}

    def _check_value(self, key: str, value: Any, allowed: tuple[Any, ...]) -> None:
        values = value if isinstance(value, list) else [value]
        if not all(one is None or one in allowed for one in values):
            instead = " or ".join(map(shown, allowed)) or "no value"
            raise CheckpointError(
                f"config.json: {key} is {shown(value)}; llama.cpp computes {self.name} with {instead} there, and gives "
                "other logits without an error. Keep loopq's own format"
            )

    def check_whole(self) -> Shape:
        """Return the shape if config.json has all values of the file's header.

        Raises
        ------
        CheckpointError
            If a key is missing, or is not a positive number, whole but for `rms_norm_eps`.
        """
        for key in (*_NEEDED, *self.needed):
            value = self.config.get(key)
            kind = float if key == "rms_norm_eps" else int
            if isinstance(value, bool) or not isinstance(value, kind) or not value > 0:
                raise CheckpointError(
                    f"config.json: {key} is {shown(value)}; a GGUF file needs a positive {kind.__name__} there"
                )
        return self

    def header(self) -> dict[str, Any]:
        """Return the header's keys, without the architecture, besides the sizes that all files have.

        Raises
        ------
        CheckpointError
            If the architecture has no form for a setting.
        """
        # As transformers 5 reads them.
        rope = self.config.get("rope_scaling") or self.config.get("rope_parameters") or {}
        return {
            "rope.freq_base": float(rope.get("rope_theta") or self.config.get("rope_theta") or 10000.0),
            "attention.layer_norm_rms_epsilon": self.config["rms_norm_eps"],
        }

    @property
    def n_loops(self) -> int:
        """Runs of the stack."""
        return 1

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        stated = self.config.get("head_dim")
        return int(stated or self.config["hidden_size"] // self.config["num_attention_heads"])

    @property
    def n_kv_heads(self) -> int:
        """Number of key/value heads."""
        return int(self.config.get("num_key_value_heads") or self.config["num_attention_heads"])

    @property
    def n_layers(self) -> int:
        """Layers of the model, as llama.cpp counts them."""
        return int(self.config["num_hidden_layers"])

    @property
    def order(self) -> list[int]:
        """Layer numbers in the file's order. A loop of `looped:` is written out, others are keys."""
        n = self.n_layers
        return layer_order(self.config[LOOP], n) if LOOP in self.config else list(range(n))

    @property
    def n_blocks(self) -> int:
        """Blocks of the file that have tensors."""
        return len(self.order)

    def check_tensors(self, names: Collection[str]) -> None:
        """Refuse a file without a tensor that it needs, given llama.cpp's names of those that it gets.

        Raises
        ------
        CheckpointError
            The message names the tensor.
        """
        found: dict[int, set[str]] = {k: set() for k in range(self.n_blocks)}
        for name in names:
            if name.startswith("blk."):
                block, _, part = name.removeprefix("blk.").partition(".")
                found.setdefault(int(block), set()).add(part)
        alike = [
            set[str]().union(*(found[k] for k in found if k % self.period == p)) for p in range(self.period)
        ]
        lost = [f"blk.{k}.{part}" for k in found for part in sorted(alike[k % self.period] - found[k])]
        lost += [] if "token_embd.weight" in names else ["token_embd.weight"]
        if lost or not any(found.values()):
            raise CheckpointError(
                f"the model's files lack {len(lost)} tensors that config.json asks for, such as "
                f"{next(iter(lost), 'blk.0')} by llama.cpp's names; the file would not be this model"
            )

    def tensors(self, name: str) -> list[str]:
        """Return llama.cpp's names of a tensor, one for each layer of the file that has it. None if it is left out.

        Raises
        ------
        CheckpointError
            If the architecture has no place for it.
        """
        module, _, last = name.rpartition(".")
        if module in _OTHERS:
            return [f"{_OTHERS[module]}.{last}"]
        stack = next((s for s in self.stacks if module.startswith(s)), None)
        layer, _, part = module.removeprefix(stack or "").partition(".")
        if stack is None or part not in self.modules or not layer.isdecimal():
            raise CheckpointError(f"tensor {name!r}: has no place in a GGUF of architecture {self.name}")
        if int(layer) >= self.n_stored:
            return []
        first = self.stacks[stack] + int(layer)
        places = [k for k, i in enumerate(self.order) if i == first] if LOOP in self.config else [first]
        return [f"blk.{place}.{self.modules[part]}.{last}" for place in places]

    @property
    def n_stored(self) -> int:
        """Layers in a stack of the model's files. A layer with a higher number is none of the model."""
        return self.n_layers

    @property
    def stacks(self) -> dict[str, int]:
        """Name prefixes of layers with the number of the first."""
        return {"model.layers.": 0}

    def parts(self, name: str) -> tuple[str, ...]:
        """Names of the tensors that a tensor of the model's files holds, one below the other. Often itself alone."""
        module, _, last = name.rpartition(".")
        whole = next((f for f in self.fused if module.endswith(f".{f}")), None)
        if whole is None:
            return (name,)
        return tuple(f"{module.removesuffix(whole)}{part}.{last}" for part in self.fused[whole])

    def apart(self, dense: Mapping[str, RawTensor]) -> dict[str, RawTensor]:
        """Cut tensors of the model's files into their `parts`."""
        pieces: dict[str, RawTensor] = {}
        for name, tensor in dense.items():
            names = self.parts(name)
            pieces |= {name: tensor} if names == (name,) else cut(tensor, list(names))
        return pieces

    def rows(self, name: str, n: int) -> NDArray[np.int64]:
        """Return the order in which a tensor's rows are stored.

        With `pairs`, rows of q and k are reordered within each head, which is exact for codes and scales.
        """
        heads = {"q_proj": int(self.config["num_attention_heads"]), "k_proj": self.n_kv_heads}
        n_heads = heads.get(name.rpartition(".")[0].rpartition(".")[2])
        order = np.arange(n)
        if n_heads is None or not self.pairs:
            return order
        if n % (2 * n_heads):
            raise CheckpointError(f"tensor {name!r}: {n} rows are no pairs in each of {n_heads} heads")
        return order.reshape(n_heads, 2, n // n_heads // 2).swapaxes(1, 2).reshape(-1)
