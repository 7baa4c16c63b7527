"""Read transformer blocks from modules for `loopq.runtime.runner`, by the names in published classes.

A block with an unknown module gives None. Differences that no name shows appear at the first run of a text, which
compares the logits with a rollout's (`loopq.runtime.generate`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loopq.errors import require
from loopq.systems.program import Block, Branch

if TYPE_CHECKING:
    from torch import Tensor, nn


#: Rotary positions that are the same for texts of every length.
_ROPES = (None, "default", "linear", "llama3")


def _holds(module: nn.Module, needed: str, optional: str = "") -> bool:
    """Whether a module has exactly the named children, and possibly the optional ones."""
    children = {name for name, _ in module.named_children()}
    return set(needed.split()) <= children <= {*needed.split(), *optional.split()}


def _is_silu(act: Any) -> bool:
    torch = require("torch")
    x = torch.linspace(-3.0, 3.0, 7)
    return bool(torch.allclose(act(x), torch.nn.functional.silu(x), atol=1e-6))


def has_plain_attention(config: Any) -> bool:
    """Whether every token attends to all earlier ones, and positions do not depend on the text's length."""
    windows = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type"))
    return not windows and kinds <= {"full_attention"} and kind in _ROPES


def llama_block(layer: nn.Module, config: Any) -> Block | None:
    """Describe a decoder layer, such as one of Llama, Mistral, Qwen, Ouro, Nanbeige or HRM-Text.

    Parameters
    ----------
    layer : nn.Module
        ``x += attn(norm(x))``, then ``x += mlp(norm(x))``. Ouro has a second norm on each branch. HRM-Text gates the
        attended values. Qwen2 and Qwen3 are supported.
    config : object
        The model's configuration.

    Returns
    -------
    Block or None
        None if the layer has other modules.
    """

    after = ("input_layernorm_2", "post_attention_layernorm_2")
    parts = ("q_proj", "k_proj", "v_proj", "gate_proj")
    if not _holds(layer, "self_attn mlp input_layernorm post_attention_layernorm", " ".join(after)):
        return None
    attention, mlp = layer.self_attn, layer.mlp
    known = _holds(attention, "q_proj k_proj v_proj o_proj", "q_norm k_norm rotary_emb gate_proj")
    if (
        not known
        or not _holds(mlp, "gate_proj up_proj down_proj", "act_fn")
        or not has_plain_attention(config)
    ):
        return None
    if not _is_silu(getattr(mlp, "act_fn", require("torch").nn.functional.silu)):
        return None
    heads = getattr(attention, "n_heads", None) or config.num_attention_heads
    head = getattr(attention, "head_dim", None) or attention.q_proj.out_features // heads
    norms = (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None))
    return Block(
        heads=attention.q_proj.out_features // head,
        kv_heads=attention.k_proj.out_features // head,
        head=head,
        neighbours=False,
        qkv=tuple(getattr(attention, name) for name in parts if hasattr(attention, name)),
        out=attention.o_proj,
        gate_up=(mlp.gate_proj, mlp.up_proj),
        down=mlp.down_proj,
        norms=(
            Branch(input=layer.input_layernorm, branch=getattr(layer, after[0], None)),
            Branch(input=layer.post_attention_layernorm, branch=getattr(layer, after[1], None)),
        ),
        scale=float(getattr(attention, "scaling", head**-0.5)),
        qk_norms=None if norms[0] is None else norms,
        gates=hasattr(attention, "gate_proj"),
    )


def raven_block(block: nn.Module, config: Any) -> Block | None:
    """Describe a block of Huginn (norms on the stream) or R-Llama (norms before the branches). None for others."""

    if not _holds(block, "attn mlp norm_1 norm_2", "norm_3 norm_4"):
        return None
    attention, mlp = block.attn, block.mlp
    if not _holds(attention, "Wqkv proj") or not _holds(mlp, "fc proj", "nonlin act_fn"):
        return None
    named = {"heads": ("n_heads", "num_attention_heads"), "kv": ("n_kv_heads", "num_key_value_heads")}
    counts = {
        key: next((n for a in names if (n := getattr(config, a, None))), 0) for key, names in named.items()
    }
    heads, kv_heads = counts["heads"], counts["kv"] or counts["heads"]
    head = config.n_embd // heads
    bias = getattr(attention, "qk_bias", None)
    on_stream = hasattr(block, "norm_4")
    if on_stream:
        norms = Branch(block.norm_1, stream=block.norm_2), Branch(block.norm_3, stream=block.norm_4)
    else:
        norms = Branch(block.norm_1), Branch(block.norm_2)
    return Block(
        heads=heads,
        kv_heads=kv_heads,
        head=head,
        neighbours=on_stream,
        qkv=(attention.Wqkv,),
        out=attention.proj,
        gate_up=(mlp.fc,),
        down=mlp.proj,
        norms=norms,
        scale=float(head**-0.5),
        qk_bias=None if bias is None else bias.reshape(-1, head),
    )


def angles_of(rotary: nn.Module, n_positions: int) -> Tensor:
    """Cosines and sines of positions from a model's rotary embedding, as float32 (n, head / 2, 2).

    Parameters
    ----------
    rotary : nn.Module
        ``rotary(x, position_ids)`` returns cosines and sines as (1, n, head) with equal halves, or as (n, head / 2).
    n_positions : int
        How many.
    """
    torch = require("torch")
    positions = torch.arange(n_positions)[None]
    cosines, sines = (t.float().squeeze(0) for t in rotary(torch.zeros(1, 1, 1), positions))
    frequencies = getattr(rotary, "inv_freq", None)
    half = cosines.shape[1] if frequencies is None else len(frequencies)
    return torch.stack((cosines[:, :half], sines[:, :half]), -1)
