"""Check a tokenizer for llama.cpp by encoding strings. The package `tokenizers` reads the model's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from loopq.errors import CheckpointError, require
from loopq.formats.gguf.pretokens import patterns_of
from loopq.formats.gguf.tokenizer import CONTROL, FILE, USER, Tokenizer
from loopq.storage.schema import shown

_SPACE = "\u2581"
#: Words, contractions, digits, scripts, signs, spaces and line ends. None is changed by composing accents.
STRINGS = (
    "Hello world", " I'm sure they'd say: WE'LL see, it's 'so'.", "x = [1, 22, 333, 4444, 3.14159e-10]",
    "for (int i = 0; i < n; ++i) {\n\treturn a[i] != nil;\n}\n", "a  b   c    d\n\n\n  e \t f ", "   ", "\n\r\n \n",
    "Größe, naïve, œuvre; Привет мир; γειά σου", "你好世界，日本語テキスト。한국어", "مرحبا שלום नमस्ते ไทย",
    "🙂👩‍👩‍👧 ½ ² ٣٤ €5,00", "HTTPServer camelCase snake_case __init__ #!/bin/sh", "...!!! ---> <= ** // \\\\ \"''\"",
)  # fmt: skip


@dataclass(frozen=True)
class Ends:
    """Ids that a tokenizer puts before and after a text."""

    before: tuple[int, ...]
    after: tuple[int, ...]


def compare(tokenizer: Tokenizer, data: bytes) -> Ends:
    """Compare tokens for llama.cpp with those of tokenizer.json.

    Parameters
    ----------
    tokenizer : Tokenizer
        The tokenizer as it will be written.
    data : bytes
        The file tokenizer.json.

    Returns
    -------
    Ends
        What tokenizer.json puts around a text.

    Raises
    ------
    CheckpointError
        If a string gets other ids.
    MissingExtraError
        If the package is not installed.
    """
    package = require("tokenizers")
    try:
        reference = package.Tokenizer.from_str(data.decode())
    except Exception as cause:
        # The package raises plain exceptions of its own parser.
        raise CheckpointError(f"{FILE}: the package tokenizers does not read it: {cause!s:.200}") from cause
    reference.no_padding()
    reference.no_truncation()
    encode = _bytes(tokenizer, package) if tokenizer.model == "gpt2" else _pieces(tokenizer)
    special = [text for i, text in tokenizer.texts.items() if tokenizer.kinds.get(i) in (CONTROL, USER)]
    alike = [string for string in STRINGS if tokenizer.doubled or not string.startswith(" ")]
    strings = (*alike, *(f"a{text}b" for text in special[:8] if tokenizer.model == "gpt2"))
    for string in strings:
        expected, ids = reference.encode(string, add_special_tokens=False).ids, encode(string)
        if ids != expected:
            raise CheckpointError(
                f"{FILE}: {shown(string)} gets ids {shown(expected)}, and in llama.cpp {shown(ids)}"
            )
    plain, whole = reference.encode("a", add_special_tokens=False).ids, reference.encode("a").ids
    at = next((k for k in range(len(whole)) if whole[k : k + len(plain)] == plain), 0)
    return Ends(tuple(whole[:at]), tuple(whole[at + len(plain) :]))


def _bytes(tokenizer: Tokenizer, package: Any) -> Any:
    """Encode as llama.cpp does: special tokens, patterns, pairs of bytes."""
    ids = {text: i for i, text in tokenizer.texts.items()}
    patterns, whole_words = patterns_of(tokenizer.pre)
    pairs = [tuple(pair.split(" ")) for pair in tokenizer.merges]
    model = package.models.BPE(vocab=ids, merges=pairs, ignore_merges=whole_words)
    encoder = package.Tokenizer(model)
    cuts = [package.pre_tokenizers.Split(package.Regex(p), "isolated") for p in patterns]
    last = package.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    encoder.pre_tokenizer = package.pre_tokenizers.Sequence([*cuts, last])
    added = [text for i, text in tokenizer.texts.items() if tokenizer.kinds.get(i) in (CONTROL, USER)]
    encoder.add_tokens([package.AddedToken(text, normalized=False) for text in added])
    return lambda string: encoder.encode(string, add_special_tokens=False).ids


def _pieces(tokenizer: Tokenizer) -> Any:
    """Encode as llama.cpp does: the neighbours that make the token with the largest score become one."""
    ids = {text: i for i, text in tokenizer.texts.items()}
    scores = {text: tokenizer.scores.get(i, 0.0) for text, i in ids.items()}

    def encode(string: str) -> list[int]:
        symbols = list((" " * tokenizer.prefix + string).replace(" ", _SPACE))
        while True:
            best = _best(symbols, scores)
            if best is None:
                return [i for symbol in symbols for i in _spelled(symbol, ids)]
            symbols[best : best + 2] = [symbols[best] + symbols[best + 1]]

    return encode


def _best(symbols: list[str], scores: Mapping[str, float]) -> int | None:
    pairs = [(scores[a + b], -k) for k, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]
    return -max(pairs)[1] if pairs else None


def _spelled(symbol: str, ids: Mapping[str, int]) -> list[int]:
    return [ids[symbol]] if symbol in ids else [ids.get(f"<0x{b:02X}>", -1) for b in symbol.encode()]
