"""Dory in llama.cpp: names of tensors and keys of the header. Spec: docs/formats/gguf.md.

Attention and MLP of a layer are two blocks there, as in the published files and in config.json.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from loopq.errors import CheckpointError
from loopq.formats.gguf.shape import ARCHITECTURES, Shape
from loopq.storage.schema import shown

_BLOCK = re.compile(r"(?:backbone|model)\.layers\.(\d+)\.([a-z_0-9]+)\.?([a-z_]*?)(?:\.weight)?")
_OTHERS = {
    "backbone.embeddings.weight": "token_embd", "model.embed_tokens.weight": "token_embd", "lm_head.weight": "output",
    "lm_head.logit_scale": "dory_logit_scale",
}  # fmt: skip
_ATTENTION = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "g_proj": "attn_gate",
    "gate_proj": "attn_gate", "sqk": "dory_sqk", "s_gate": "dory_s_gate", "": "dory_alpha",
}  # fmt: skip
_MLP = {
    "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down", "suv_gate": "dory_suv_gate",
    "suv_up": "dory_suv_up", "": "dory_alpha",
}  # fmt: skip
#: Parts of a layer, and of a block, with the block that they belong to.
_LAYER = {"self_attn": 0, "lambda_1": 0, "mlp": 1, "lambda_2": 1}
_OWN = ("mixer", "attn_alpha", "mlp_alpha")
_LETTERS = {"sliding_attention": "S", "full_attention": "*", "mlp": "-"}


@ARCHITECTURES.register("dory")
class DoryShape(Shape):
    """Layers before a loop, in it and after it."""

    classes: ClassVar[tuple[str, ...]] = ("DoryForCausalLM",)
    needed: ClassVar[tuple[str, ...]] = (
        "n_input_layers", "n_recurrent_layers", "n_output_layers", "n_recurrent_loops", "sliding_window",
    )  # fmt: skip
    modules: ClassVar[Mapping[str, str]] = {}
    pairs: ClassVar[bool] = False
    period: ClassVar[int] = 2
    loops_key: ClassVar[str] = "recurrent_loop_count"

    @property
    def n_loops(self) -> int:
        """Runs of the loop."""
        return int(self.config["n_recurrent_loops"])

    def tensors(self, name: str) -> list[str]:
        """As in `Shape`, with the names of blocks."""
        target = _tensor(name)
        return super().tensors(name) if target is None else [target]

    def header(self) -> dict[str, Any]:
        """Keys of positions, blocks and initial values.

        Raises
        ------
        CheckpointError
            If config.json does not list attention and MLP as blocks of their own.
        """
        config = self.config
        letters = [_LETTERS.get(kind) for kind in config.get("layer_types") or ()]
        pattern = "".join(letter or "?" for letter in letters)
        if len(pattern) != config["num_hidden_layers"] or not re.fullmatch(r"([S*]-)+", pattern):
            raise CheckpointError(
                f"config.json: layer_types {shown(pattern)}: attention and mlp do not take turns"
            )
        return {
            "rope.freq_base": self._rope_base("full_attention"),
            "input_layer_count": config["n_input_layers"],
            "recurrent_layer_count": config["n_recurrent_layers"],
            "output_layer_count": config["n_output_layers"],
            self.loops_key: self.n_loops,
            "attention.sliding_window": config["sliding_window"],
            "layer_pattern": pattern,
            "recurrent_kv_cache_mode": config.get("recurrent_kv_cache_mode", "per_loop"),
            "rope.profile": [2 if letter == "S" else 1 for letter in pattern],
            "rope.freq_base_2": self._rope_base("sliding_attention"),
            "init_std": float(config["initializer_range"]),
            "alpha_init": float(config["ngpt_alpha_init"]),
            "gate_init": float(config["hidden_size"]) ** 0.5,
        }

    def _rope_base(self, kind: str) -> float:
        """Return the base of the rotary positions of one kind of attention."""
        return float(self.config["rope_parameters"][kind]["rope_theta"])


def _tensor(name: str) -> str | None:
    """Return llama.cpp's name of a tensor in transformers' files or in the published ones. None if it has none."""
    if name in _OTHERS:
        return f"{_OTHERS[name]}.weight"
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in (*_LAYER, *_OWN):
        return None
    block = int(match[1]) if match[2] in _OWN else 2 * int(match[1]) + _LAYER[match[2]]
    part = (_ATTENTION, _MLP)[block % 2].get(match[3])
    return None if part is None else f"blk.{block}.{part}.weight"
