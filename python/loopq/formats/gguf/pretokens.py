"""llama.cpp's names of pre-tokenizers: how a text is cut before pairs of bytes are merged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from loopq.errors import CheckpointError
from loopq.storage.schema import shown

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(letters: str, digits: str, others: str) -> str:
    """Contractions, words with the character before them, digits, and punctuation with line ends."""
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}| ?[^\s{others}]+[\r\n]*|{_ENDS}"


#: Words that end where small letters do.
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDS}"
)
_LLAMA3 = _words(r"\p{L}", r"\p{N}{1,3}", r"\p{L}\p{N}")
#: By the patterns, applied in turn, and by whether a whole word that is a token is not built from pairs. Each was run
#: in llama.cpp (`tests/formats/gguf/test_tokenizer.py`).
NAMES: Mapping[tuple[tuple[str, ...], bool], str] = {
    ((_GPT2,), False): "gpt-2",
    ((r"\p{N}", _GPT2), False): "smollm",
    ((_LLAMA3,), True): "llama-bpe",
    ((_LLAMA3,), False): "smaug-bpe",
    ((_words(r"\p{L}", r"\p{N}", r"\p{L}\p{N}"),), False): "qwen2",
    ((_words(r"[\p{L}\p{M}]", r"\p{N}", r"\p{L}\p{M}\p{N}"),), False): "qwen35",
    # Its "gpt-4o" cuts words of Devanagari and Thai at their marks.
    ((_CASED,), False): "granite-embed-multi-97m",
}


def steps(part: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Go through a normalizer or a pre-tokenizer of tokenizer.json, one step at a time."""
    if part is None:
        return
    inner = part.get("normalizers", part.get("pretokenizers"))
    if isinstance(inner, list) and all(isinstance(one, dict) for one in inner):
        for one in inner:
            yield from steps(one)
    else:
        yield part


def name_of(part: Mapping[str, Any] | None, *, whole_words: bool) -> str:
    """Return llama.cpp's name of a pre-tokenizer.

    Parameters
    ----------
    part : mapping or None
        "pre_tokenizer" of tokenizer.json.
    whole_words : bool
        "ignore_merges" of tokenizer.json.

    Raises
    ------
    CheckpointError
        If it is not known.
    """
    patterns = tuple(pattern for step in steps(part) for pattern in _patterns(step))
    name = NAMES.get((patterns, whole_words))
    if name is None:
        text = shown(patterns) if patterns else "no pattern"
        raise CheckpointError(f"tokenizer.json: pre_tokenizer: llama.cpp's name of {text} is not known")
    return name


def patterns_of(name: str) -> tuple[tuple[str, ...], bool]:
    """Return patterns of a name, and whether whole words are taken."""
    return next(key for key, known in NAMES.items() if known == name)


def _patterns(step: Mapping[str, Any]) -> tuple[str, ...]:
    """Regular expression of one step. Empty for the step from bytes to characters."""
    kind = step.get("type")
    if kind == "ByteLevel" and not step.get("add_prefix_space", True):
        return (_GPT2,) if step.get("use_regex", True) else ()
    if kind == "Digits":
        return (r"\p{N}" if step.get("individual_digits") else r"\p{N}+",)
    isolated = (step.get("behavior"), bool(step.get("invert"))) in (("Isolated", False), ("Removed", True))
    pattern = step.get("pattern")
    if kind == "Split" and isolated and isinstance(pattern, dict) and isinstance(pattern.get("Regex"), str):
        return (pattern["Regex"],)
    raise CheckpointError(f"tokenizer.json: pre_tokenizer: llama.cpp has no form for {shown(dict(step))}")
