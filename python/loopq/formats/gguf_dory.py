"""Dory in llama.cpp: names of tensors and keys of the header. Spec: docs/formats/gguf.md.

Attention and MLP of a layer are two blocks there, as in the published files and in config.json.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from loopq.errors import CheckpointError
from loopq.storage.schema import shown

DORY = "dory"
#: Number of runs of the loop.
LOOPS = f"{DORY}.recurrent_loop_count"
#: Whole numbers of config.json that the header needs.
NEEDED = ("n_input_layers", "n_recurrent_layers", "n_output_layers", "n_recurrent_loops", "sliding_window")
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


def tensor(name: str) -> str | None:
    """Return llama.cpp's name of a tensor in transformers' files or in the published ones. None if it has none."""
    if name in _OTHERS:
        return f"{_OTHERS[name]}.weight"
    found = _BLOCK.fullmatch(name)
    if found is None or found[2] not in (*_LAYER, *_OWN):
        return None
    block = int(found[1]) if found[2] in _OWN else 2 * int(found[1]) + _LAYER[found[2]]
    part = (_ATTENTION, _MLP)[block % 2].get(found[3])
    return None if part is None else f"blk.{block}.{part}.weight"


def rope_base(config: Mapping[str, Any], kind: str = "full_attention") -> float:
    """Return the base of the rotary positions of one kind of attention."""
    own = config["rope_parameters"][kind]
    if own.get("rope_type", "default") != "default":
        raise CheckpointError(f"config.json: rope_parameters {own}: only plain rotary positions are written")
    return float(own["rope_theta"])


def keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the header's own keys.

    Raises
    ------
    CheckpointError
        If config.json does not list attention and MLP as blocks of their own.
    """
    letters = [_LETTERS.get(kind) for kind in config.get("layer_types") or ()]
    pattern = "".join(letter or "?" for letter in letters)
    if len(pattern) != config["num_hidden_layers"] or not re.fullmatch(r"([S*]-)+", pattern):
        raise CheckpointError(
            f"config.json: layer_types {shown(pattern)}: attention and mlp do not take turns"
        )
    return {
        f"{DORY}.input_layer_count": config["n_input_layers"],
        f"{DORY}.recurrent_layer_count": config["n_recurrent_layers"],
        f"{DORY}.output_layer_count": config["n_output_layers"],
        LOOPS: config["n_recurrent_loops"],
        f"{DORY}.attention.sliding_window": config["sliding_window"],
        f"{DORY}.layer_pattern": pattern,
        f"{DORY}.recurrent_kv_cache_mode": config.get("recurrent_kv_cache_mode", "per_loop"),
        f"{DORY}.rope.profile": [2 if letter == "S" else 1 for letter in pattern],
        f"{DORY}.rope.freq_base_2": rope_base(config, "sliding_attention"),
        f"{DORY}.init_std": float(config["initializer_range"]),
        f"{DORY}.alpha_init": float(config["ngpt_alpha_init"]),
        f"{DORY}.gate_init": float(config["hidden_size"]) ** 0.5,
    }
