"""Text of token ids."""

from __future__ import annotations

from collections.abc import Sequence

from loopq.errors import CheckpointError, model_code
from loopq.models.load import LoadedModel, encode_bytes


def decode(loaded: LoadedModel, ids: Sequence[int]) -> str:
    """Return the text of token ids. Without a tokenizer or bytes, return the ids themselves.

    Parameters
    ----------
    loaded : LoadedModel
        Its tokenizer or encoder applies.
    ids : sequence of int
        Token ids.

    Returns
    -------
    str
        Text without special tokens. An unfinished UTF-8 character at its end becomes U+FFFD.
    """
    if hasattr(loaded.tokenizer, "decode"):
        with model_code(f"text of {len(ids)} tokens", CheckpointError, "the tokenizer"):
            return str(loaded.tokenizer.decode(list(ids), skip_special_tokens=True))
    if loaded.encode is encode_bytes and max(ids, default=0) < 256:
        return bytes(ids).decode("utf-8", "replace")
    return "".join(f" {i}" for i in ids)
