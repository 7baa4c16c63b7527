"""Architectures of llama.cpp: tensor names, and order of rows and layers. Spec: docs/formats/gguf.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopq.errors import CheckpointError
from loopq.formats import gguf_dory
from loopq.formats.gguf_dory import DORY
from loopq.formats.hf_folder import CONFIG
from loopq.layers.loop_spec import LOOP, PREFIX, layer_order
from loopq.storage.schema import checked, parse_json, shown

HRM, OURO = "hrm_text", "ouro"
#: Classes whose layers are Llama's, or nearly, and what llama.cpp calls them.
ARCHITECTURES = {
    "NanbeigeForCausalLM": "nanbeige", "LlamaForCausalLM": "llama", "HrmTextForCausalLM": HRM, "DoryForCausalLM": DORY,
    "OuroForCausalLM": OURO,
}  # fmt: skip
_MODULES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.gate_proj": "attn_gate", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
#: Of Ouro alone: the norms of what attention and MLP return.
_RETURNED = {"input_layernorm_2": "post_attention_norm", "post_attention_layernorm_2": "post_ffw_norm"}
_OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
#: Of HRM-Text alone: the low stack's first state, and the numbers that say how its stacks run.
_STATE = {"model.z_L_init": "hrm.z_l_init"}
CYCLES = {"num_layers_per_stack": "layers_per_stack", "H_cycles": "h_cycles", "L_cycles": "l_cycles"}
#: Keys of config.json without which the file has no header.
_NEEDED = (
    "vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers", "intermediate_size",
    "num_attention_heads",
)  # fmt: skip
#: Those of one architecture, or of all others.
_MORE = {HRM: ("rms_norm_eps", *CYCLES), DORY: gguf_dory.NEEDED, OURO: ("rms_norm_eps", "total_ut_steps")}
#: Keys of config.json with the number of loops.
_N_LOOPS = {HRM: "H_cycles", DORY: "n_recurrent_loops", OURO: "total_ut_steps"}


@dataclass(frozen=True)
class Shape:
    """Settings of a Llama-shaped model in config.json."""

    architecture: str
    config: Mapping[str, Any]

    @classmethod
    def read(cls, side_files: Mapping[str, bytes]) -> Shape:
        """Read the config.json among the files of a checkpoint or a dump. See `of`."""
        config = parse_json(side_files.get(CONFIG, b"{}"), CONFIG, finite=False)
        return cls.of(checked(dict[str, Any], config, CONFIG))

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """Read the settings of a config.json.

        Raises
        ------
        CheckpointError
            If llama.cpp does not support the architecture, or the file cannot store a setting.
        """
        names = config.get("architectures") or []
        dense = [str(n).removeprefix(PREFIX) for n in names]
        found = next((ARCHITECTURES[n] for n in dense if n in ARCHITECTURES), None)
        if found is None:
            raise CheckpointError(
                f"config.json: architectures {names}; of looped models llama.cpp runs Nanbeige4.2, HRM-Text, Dory and "
                f"Ouro, and loopq writes GGUF for {', '.join(ARCHITECTURES)}"
            )
        scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if scaling.get("rope_type", scaling.get("type", "default")) != "default":
            raise CheckpointError(f"config.json: rope_scaling {scaling}: only plain rotary positions")
        return cls(found, config)

    def check_whole(self) -> Shape:
        """Return the shape if config.json has all values of the file's header.

        Raises
        ------
        CheckpointError
            If a key is missing, or is not a positive number, whole but for `rms_norm_eps`.
        """
        for key in (*_NEEDED, *_MORE.get(self.architecture, ("rms_norm_eps",))):
            value = self.config.get(key)
            kind = float if key == "rms_norm_eps" else int
            if isinstance(value, bool) or not isinstance(value, kind) or not value > 0:
                raise CheckpointError(
                    f"config.json: {key} is {shown(value)}; a GGUF file needs a positive {kind.__name__} there"
                )
        return self

    @property
    def n_loops(self) -> int:
        """Runs of the stack, one for a plain Llama. HRM-Text counts those of the high stack."""
        if self.architecture in _N_LOOPS:
            return int(self.config[_N_LOOPS[self.architecture]])
        weights = self.config.get("loop_loss_weights")
        return len(weights) + 1 if weights else int(self.config.get("num_loops") or 1)

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        own = self.config.get("head_dim")
        return int(own or self.config["hidden_size"] // self.config["num_attention_heads"])

    @property
    def n_kv_heads(self) -> int:
        """Number of key/value heads."""
        return int(self.config.get("num_key_value_heads") or self.config["num_attention_heads"])

    @property
    def order(self) -> list[int]:
        """Layer numbers in the file's order. A loop of `looped:` is written out, others are keys.

        llama.cpp counts HRM-Text's layers once per run.
        """
        n = int(self.config["num_hidden_layers"])
        if self.architecture == HRM:
            n = int(self.config["num_layers_per_stack"]) * self.n_loops * (int(self.config["L_cycles"]) + 1)
        return layer_order(self.config[LOOP], n) if LOOP in self.config else list(range(n))

    def tensors(self, name: str) -> list[str]:
        """Return llama.cpp's names of a tensor, one for each layer of the file that has it. None for Ouro's exit gate.

        Raises
        ------
        CheckpointError
            If the architecture has no place for it.
        """
        if self.architecture == DORY and (found := gguf_dory.tensor(name)) is not None:
            return [found]
        module, _, last = name.rpartition(".")
        if module in _OTHERS:
            return [f"{_OTHERS[module]}.{last}"]
        if self.architecture == OURO and module == "model.early_exit_gate":
            return []
        if self.architecture == HRM and name in _STATE:
            return [_STATE[name]]
        stack = next((s for s in self.stacks if module.startswith(s)), None)
        layer, _, part = module.removeprefix(stack or "").partition(".")
        modules = _MODULES | (_RETURNED if self.architecture == OURO else {})
        if stack is None or part not in modules or not layer.isdecimal() or self.architecture == DORY:
            raise CheckpointError(
                f"tensor {name!r}: has no place in a GGUF of architecture {self.architecture}"
            )
        first = self.stacks[stack] + int(layer)
        places = [k for k, i in enumerate(self.order) if i == first] if LOOP in self.config else [first]
        return [f"blk.{place}.{modules[part]}.{last}" for place in places]

    @property
    def stacks(self) -> dict[str, int]:
        """Name prefixes of layers with the number of the first. HRM-Text has its low stack before the high one."""
        if self.architecture != HRM:
            return {"model.layers.": 0}
        return {
            "model.L_module.layers.": 0,
            "model.H_module.layers.": int(self.config["num_layers_per_stack"]),
        }

    def rows(self, name: str, n: int) -> NDArray[np.int64]:
        """Return the order in which a tensor's rows are stored.

        llama.cpp rotates neighbours in a head, while transformers rotates the halves. Rows of q and k are therefore
        reordered within each head, which is exact for codes and scales. For HRM-Text and Dory it rotates halves too.
        """
        heads = {"q_proj": int(self.config["num_attention_heads"]), "k_proj": self.n_kv_heads}
        n_heads = heads.get(name.rpartition(".")[0].rpartition(".")[2])
        order = np.arange(n)
        if n_heads is None or self.architecture in (HRM, DORY):
            return order
        if n % (2 * n_heads):
            raise CheckpointError(f"tensor {name!r}: {n} rows are no pairs in each of {n_heads} heads")
        return order.reshape(n_heads, 2, n // n_heads // 2).swapaxes(1, 2).reshape(-1)
