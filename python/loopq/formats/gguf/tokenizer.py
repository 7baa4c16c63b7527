"""The tokenizer among a model's files, in the terms of llama.cpp. Spec: docs/formats/gguf.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from loopq.errors import CheckpointError
from loopq.formats.gguf import sentencepiece
from loopq.formats.gguf.pretokens import name_of, steps
from loopq.formats.gguf.sentencepiece import Pieces
from loopq.storage.schema import Object, checked, parse_json, shown

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
#: Score of a token that no merge makes, as in llama.cpp's converter.
LEAST = -1000.0
_SPACE = "\u2581"
_ONCE = (
    f"note: llama.cpp puts a space before every text; {FILE} does not before one that begins with a space or follows "
    "a special token"
)


@dataclass(frozen=True)
class _Added:
    id: int
    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


@dataclass(frozen=True)
class _Model:
    vocab: Any
    type: str | None = None
    merges: tuple[Any, ...] = ()
    unk_token: str | None = None
    byte_fallback: bool = False
    ignore_merges: bool | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None


@dataclass(frozen=True)
class _Json:
    model: _Model
    added_tokens: tuple[_Added, ...] = ()
    normalizer: Object | None = None
    pre_tokenizer: Object | None = None


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer that llama.cpp can run.

    Parameters
    ----------
    source : str
        File that it comes from.
    texts : mapping of int to str
        Tokens by their ids.
    model : {"gpt2", "llama", ""}
        Pairs of bytes, or pairs of characters with scores. Empty if llama.cpp has no form.
    kinds : mapping of int to int
        Types of tokens, without normal ones.
    scores : mapping of int to float
        For "llama", the token with the largest score is made first.
    merges : tuple of str
        For "gpt2", pairs in their order.
    pre : str
        For "gpt2", llama.cpp's name of the pre-tokenizer.
    prefix : bool
        For "llama", whether a space is put before a text.
    doubled : bool
        Whether that is also done for a text that begins with a space.
    ids : mapping of str to int
        Special tokens that the file itself names.
    refusal : str
        Why llama.cpp has no form.
    notes : tuple of str
        Known differences between it and llama.cpp.
    """

    source: str
    texts: Mapping[int, str]
    model: Literal["gpt2", "llama", ""] = ""
    kinds: Mapping[int, int] = field(default_factory=dict)
    scores: Mapping[int, float] = field(default_factory=dict)
    merges: tuple[str, ...] = ()
    pre: str = ""
    prefix: bool = True
    doubled: bool = True
    ids: Mapping[str, int] = field(default_factory=dict)
    refusal: str = ""
    notes: tuple[str, ...] = ()

    @staticmethod
    def read(side_files: Mapping[str, bytes]) -> Tokenizer | None:
        """Read the tokenizer among a model's files. None if there is none.

        Raises
        ------
        CheckpointError
            If a file is damaged, or an added token has another's id.
        """
        added = _added(side_files)
        if FILE not in side_files:
            data = side_files.get(sentencepiece.FILE)
            return None if data is None else _of_pieces(data)._with(added)
        data = _json(_Json, side_files[FILE], FILE)
        tokenizer = _of_json(data)
        pieces = side_files.get(sentencepiece.FILE)
        if tokenizer.model == "llama" and pieces is not None:
            # The same tokens, with scores and types of their own.
            scored = _of_pieces(pieces)
            tokenizer = dataclasses.replace(
                tokenizer, source=scored.source, kinds=scored.kinds, scores=scored.scores, ids=scored.ids
            )
        return tokenizer._with([*data.added_tokens, *added])

    def _with(self, added: Iterable[_Added]) -> Tokenizer:
        """Add tokens, or give known ones the type of an added token."""
        texts, kinds, notes = dict(self.texts), dict(self.kinds), self.notes
        stripping = set()
        for one in added:
            text = texts.setdefault(one.id, one.content)
            if text not in (one.content, one.content.replace(" ", _SPACE)):
                raise CheckpointError(
                    f"{self.source}: added token {shown(one.content)} has id {one.id}, as has {shown(text)}"
                )
            if kinds.get(one.id, NORMAL) in (NORMAL, USER):
                kinds[one.id] = CONTROL if one.special else USER
            if one.lstrip or one.rstrip or one.single_word:
                stripping.add(one.content)
        # llama.cpp looks for these in a text before spaces are replaced.
        texts |= {i: texts[i].replace(_SPACE, " ") for i, kind in kinds.items() if kind == USER}
        if stripping:
            notes += (
                f"note: {shown(sorted(stripping))} take spaces or word ends beside them into account, "
                "which llama.cpp does not",
            )
        return dataclasses.replace(self, texts=texts, kinds=kinds, notes=notes)


def _json(kind: Any, data: bytes, name: str) -> Any:
    return checked(kind, parse_json(data, name, finite=False), name, others=True)


def settings(side_files: Mapping[str, bytes], name: str) -> Object:
    """Return one of a tokenizer's JSON files. Empty if it is not there."""
    values: Object = _json(Object, side_files.get(name, b"{}"), name)
    return values


def _added(side_files: Mapping[str, bytes]) -> list[_Added]:
    """Tokens that further files add."""
    listed = settings(side_files, CONFIG).get("added_tokens_decoder") or {}
    tokens = [{"id": _number(i), **checked(Object, token, CONFIG)} for i, token in listed.items()]
    plain = settings(side_files, "added_tokens.json")
    known = {one["id"] for one in tokens}
    tokens += [{"id": i, "content": text} for text, i in plain.items() if i not in known]
    return [checked(_Added, one, CONFIG, others=True) for one in tokens]


def _number(text: str) -> int:
    if not text.isdecimal():
        raise CheckpointError(f"{CONFIG}: added_tokens_decoder: {shown(text)} is no token id")
    return int(text)


def _of_pieces(data: bytes) -> Tokenizer:
    pieces = Pieces.read(data)
    notes: tuple[str, ...] = ()
    if pieces.normalizer:
        notes = (
            f"note: {sentencepiece.FILE} changes a text before it is cut ({pieces.normalizer}), which llama.cpp does "
            "not: give it such text, without line ends and tabs",
        )
    return Tokenizer(
        sentencepiece.FILE,
        dict(enumerate(pieces.tokens)),
        "llama",
        {i: kind for i, kind in enumerate(pieces.kinds) if kind != NORMAL},
        dict(enumerate(pieces.scores)),
        prefix=pieces.prefix,
        ids={key: i for key, i in pieces.ids.items() if i >= 0},
        notes=notes,
    )


def _of_json(data: _Json) -> Tokenizer:
    """Convert tokenizer.json without its added tokens. One that llama.cpp has no form for says so in `refusal`."""
    texts = _texts(data.model.vocab)
    plain = Tokenizer(FILE, texts)
    if data.model.type not in ("BPE", None):
        return dataclasses.replace(plain, refusal=f"{FILE}: model {shown(data.model.type)}")
    if data.model.continuing_subword_prefix or data.model.end_of_word_suffix:
        return dataclasses.replace(plain, refusal=f"{FILE}: model with marks inside or at the end of words")
    merges = _merges(data.model.merges)
    ids = {text: i for i, text in texts.items()}
    unknown = ids.get(data.model.unk_token or "")
    named = {} if unknown is None else {"unk": unknown}
    try:
        prefix = _prefix(data)
        if prefix is not None:
            kinds = {i: BYTE for text, i in ids.items() if _is_byte(text) and data.model.byte_fallback}
            kinds |= dict.fromkeys(named.values(), UNKNOWN)
            scores, doubled = _scores(merges, ids), not prefix or data.pre_tokenizer is None
            return dataclasses.replace(
                plain, model="llama", kinds=kinds, scores=scores, prefix=prefix, doubled=doubled, ids=named,
                notes=() if doubled else (_ONCE,),
            )  # fmt: skip
        notes = _normalized(data)
        pre = name_of(data.pre_tokenizer, whole_words=bool(data.model.ignore_merges))
    except CheckpointError as cause:
        return dataclasses.replace(plain, refusal=str(cause))
    pairs = tuple(f"{a} {b}" for a, b in merges)
    return dataclasses.replace(plain, model="gpt2", merges=pairs, pre=pre, ids=named, notes=notes)


def _texts(vocab: Any) -> dict[int, str]:
    """Tokens by their ids. A unigram model lists them with scores."""
    if isinstance(vocab, list):
        return {i: str(one[0]) for i, one in enumerate(vocab) if isinstance(one, list) and one}
    if not isinstance(vocab, dict) or not all(type(i) is int and i >= 0 for i in vocab.values()):
        raise CheckpointError(f"{FILE}: model.vocab: {shown(vocab)}; allowed: tokens with their ids")
    texts = {i: text for text, i in vocab.items()}
    if len(texts) < len(vocab):
        raise CheckpointError(f"{FILE}: model.vocab: two tokens have the same id")
    return texts


def _merges(listed: Any) -> list[tuple[str, str]]:
    """Pairs in their order. Older files join the two by a space."""
    pairs = [one.split(" ") if isinstance(one, str) else one for one in listed]
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise CheckpointError(f"{FILE}: model.merges: not all are two texts")
    return [(str(a), str(b)) for a, b in pairs]


def _is_byte(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


def _scores(merges: list[tuple[str, str]], ids: Mapping[str, int]) -> dict[int, float]:
    """The first merge that makes a token gives its score."""
    scores: dict[int, float] = {}
    for rank, (a, b) in enumerate(merges):
        if a + b in ids:
            scores.setdefault(ids[a + b], -float(rank))
    least = min(LEAST, -float(len(merges)))
    return {i: scores.get(i, least) for i in ids.values()}


def _prefix(data: _Json) -> bool | None:
    """Whether a space is put before a text that has U+2581 in the place of spaces. None if spaces are bytes.

    Raises
    ------
    CheckpointError
        If llama.cpp has no form for a step.
    """
    normalizer, cut = list(steps(data.normalizer)), list(steps(data.pre_tokenizer))
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    spaces = [one for one in cut if one.get("type") == "Metaspace"]
    if replaced not in normalizer and not spaces:
        return None
    before = {"type": "Prepend", "prepend": _SPACE}
    odd = [one for one in normalizer if one not in (before, replaced)] + [
        one for one in cut if one not in spaces
    ]
    if odd or len(spaces) > 1 or not data.model.byte_fallback:
        raise CheckpointError(f"{FILE}: llama.cpp has no form for {shown(odd or 'unknown characters')}")
    scheme = spaces[0].get("prepend_scheme", "always") if spaces else "never"
    return before in normalizer or (scheme != "never" and spaces[0].get("add_prefix_space", True))


def _normalized(data: _Json) -> tuple[str, ...]:
    """Notes about a normalizer of a tokenizer of bytes."""
    kinds = [one.get("type") for one in steps(data.normalizer)]
    if kinds == ["NFC"]:
        return (f"note: {FILE} composes letters and their accents (NFC), which llama.cpp does not",)
    if kinds:
        raise CheckpointError(f"{FILE}: normalizer: llama.cpp has no form for {shown(kinds)}")
    return ()
