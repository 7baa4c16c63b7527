"""Keys of a tokenizer in a GGUF file: of the model's own files, or of another GGUF. Spec: docs/formats/gguf.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopq.errors import CheckpointError
from loopq.formats.gguf.encoding import Ends, compare
from loopq.formats.gguf.file import open_gguf, package, told
from loopq.formats.gguf.tokenizer import CONFIG, FILE, LEAST, NORMAL, UNUSED, Tokenizer, settings
from loopq.storage.schema import Object, shown

_TOKENS, _TYPES, _SCORES = (f"tokenizer.ggml.{key}" for key in ("tokens", "token_type", "scores"))
_NONE = "none"
_INSTEAD = "give --vocabulary FILE.gguf, or --vocabulary none for a file that takes token ids only"
#: Special tokens: names in config files and in GGUF.
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
#: Files with a chat template. The first one counts, as in transformers.
_JINJA, _TEMPLATES = "chat_template.jinja", ("chat_template.json", CONFIG)


@dataclass(frozen=True)
class Vocabulary:
    """Keys of a file's tokenizer.

    Parameters
    ----------
    entries : mapping of str to tuple
        Keys with value, type and, for an array, the type of its elements.
    notes : tuple of str
        Lines for the user.
    """

    entries: Mapping[str, tuple[Any, ...]]
    notes: tuple[str, ...]

    @staticmethod
    def of(
        side_files: Mapping[str, bytes], config: Mapping[str, Any], given: str | Path | None
    ) -> Vocabulary:
        """Read the tokenizer among a model's files, or that of another GGUF.

        Parameters
        ----------
        side_files : mapping of str to bytes
            The model's files.
        config : mapping
            Its config.json.
        given : path or "none", optional
            GGUF file to copy the tokenizer from.

        Raises
        ------
        CheckpointError
            If llama.cpp has no form for the tokenizer, it is another model's, or it does not fit the model's rows.
        """
        if str(given) == _NONE:
            return _without("as asked")
        tokenizer, rows = Tokenizer.read(side_files), int(config["vocab_size"])
        if given is not None:
            entries, source = _given(Path(given), tokenizer), str(given)
            notes: tuple[str, ...] = ()
        elif tokenizer is None:
            return _without(
                f"no {FILE} or tokenizer.model beside the model; --vocabulary FILE.gguf copies one"
            )
        else:
            entries, source, notes = _own(tokenizer, side_files, config), tokenizer.source, tokenizer.notes
        n_tokens = len(entries[_TOKENS][0])
        if n_tokens > rows:
            raise CheckpointError(
                f"{source}: {n_tokens} tokens for the {rows} rows of the model: another model's"
            )
        _check_special(entries, rows, source)
        kind = entries["tokenizer.ggml.model"][0]
        pre = entries.get("tokenizer.ggml.pre", ("",))[0]
        said = f"tokenizer of {source}: {kind}{pre and f' ({pre})'}, {n_tokens} tokens"
        said += f", padded to {rows} rows" if n_tokens < rows else ""
        return Vocabulary(_padded(entries, rows - n_tokens), (said, *notes))


def _without(why: str) -> Vocabulary:
    kind = package().GGUFValueType.STRING
    note = f"note: no tokenizer in the file, so it takes token ids only: {why}"
    return Vocabulary({"tokenizer.ggml.model": (_NONE, kind, None)}, (note,))


def _given(path: Path, vocab: Tokenizer | None) -> dict[str, tuple[Any, ...]]:
    """Every key of another GGUF's tokenizer, whose tokens must be the model's own if it has any."""
    fields = [f for name, f in open_gguf(path).fields.items() if name.startswith("tokenizer.")]
    with told(path):
        entries = {f.name: (f.contents(), *[*f.types, None][:2]) for f in fields}
    tokens = entries.get(_TOKENS, ([],))[0]
    if "tokenizer.ggml.model" not in entries or not isinstance(tokens, list) or not tokens:
        raise CheckpointError(f"{path}: a GGUF without a tokenizer")
    if vocab is not None:
        kinds = entries.get(_TYPES, ([NORMAL] * len(tokens),))[0]
        for i, text in sorted(vocab.texts.items()):
            if i >= len(tokens) or (kinds[i] in (NORMAL, UNUSED) and tokens[i] != text):
                there = shown(tokens[i]) if i < len(tokens) else "nothing"
                raise CheckpointError(
                    f"{path}: token {i} is {there}, and {vocab.source} of the model says {shown(text)}: it is another "
                    "model's tokenizer"
                )
    return entries


def _own(
    vocab: Tokenizer, side_files: Mapping[str, bytes], config: Mapping[str, Any]
) -> dict[str, tuple[Any, ...]]:
    """Keys for the model's own tokenizer."""
    if not vocab.model:
        raise CheckpointError(f"{vocab.refusal}; {_INSTEAD}")
    ends = None
    if FILE in side_files:
        try:
            ends = compare(vocab, side_files[FILE])
        except CheckpointError as cause:
            raise CheckpointError(f"{cause}; {_INSTEAD}") from None
    of = package().GGUFValueType
    n = max(vocab.texts) + 1
    values: Object = {"model": vocab.model}
    if vocab.model == "gpt2":
        values["pre"] = vocab.pre
    values["tokens"] = [vocab.texts.get(i, f"[PAD{i}]") for i in range(n)]
    if vocab.model == "llama":
        values["scores"] = [float(vocab.scores.get(i, LEAST)) for i in range(n)]
    values["token_type"] = [vocab.kinds.get(i, NORMAL if i in vocab.texts else UNUSED) for i in range(n)]
    if vocab.merges:
        values["merges"] = list(vocab.merges)
    ids = _special(vocab, side_files, config)
    values |= {f"{_SPECIAL[name]}_token_id": i for name, i in ids.items()}
    values |= _around(vocab, side_files, ids, ends)
    if vocab.model == "llama":
        values["add_space_prefix"] = vocab.prefix
    entries = {f"tokenizer.ggml.{key}": _typed(value, of) for key, value in values.items()}
    templates = _templates(side_files)
    if "default" in templates:
        entries["tokenizer.chat_template"] = _typed(templates.pop("default"), of)
    entries |= {f"tokenizer.chat_template.{name}": _typed(text, of) for name, text in templates.items()}
    return entries | ({"tokenizer.chat_templates": _typed([*templates], of)} if templates else {})


def _typed(value: Any, of: Any) -> tuple[Any, ...]:
    if isinstance(value, list):
        return value, of.ARRAY, of.get_type(value[0])
    return value, of.UINT32 if type(value) is int else of.get_type(value), None


def _special(vocab: Tokenizer, side_files: Mapping[str, bytes], config: Mapping[str, Any]) -> dict[str, int]:
    """Ids of special tokens: by text in the tokenizer's settings, by number in config.json, or by the tokenizer."""
    stated = settings(side_files, "special_tokens_map.json") | settings(side_files, CONFIG)
    ids = {text: i for i, text in vocab.texts.items()}
    special: dict[str, int] = {}
    for name in _SPECIAL:
        text = stated.get(f"{name}_token")
        text = text.get("content") if isinstance(text, dict) else text
        number = config.get(f"{name}_token_id")
        number = number[0] if isinstance(number, list) and number else number
        by_text = ids.get(text) if isinstance(text, str) else None
        # A negative number in config.json means that there is none.
        by_number = number if type(number) is int and number >= 0 else vocab.ids.get(name)
        chosen = by_text if by_text is not None else by_number
        if chosen is not None:
            special[name] = chosen
    return special


def _around(
    vocab: Tokenizer, side_files: Mapping[str, bytes], ids: Mapping[str, int], ends: Ends | None
) -> dict[str, bool]:
    """Whether the first and the last special token stand around a text."""
    stated = settings(side_files, CONFIG)
    around = {}
    for name, place in (("bos", "before"), ("eos", "after")):
        asked, there = stated.get(f"add_{name}_token"), () if ends is None else getattr(ends, place)
        if there and not isinstance(asked, bool) and there != (ids.get(name),):
            raise CheckpointError(
                f"{FILE}: puts tokens {shown(list(there))} {place} a text, and llama.cpp only {name} "
                f"({ids.get(name)}); {_INSTEAD}"
            )
        default = bool(there) if ends is not None else vocab.model == "llama" and name == "bos"
        around[f"add_{name}_token"] = asked if isinstance(asked, bool) else default
    return around


def _templates(side_files: Mapping[str, bytes]) -> dict[str, str]:
    """Chat templates by their names."""
    templates: Any = None
    if _JINJA in side_files:
        try:
            templates = side_files[_JINJA].decode()
        except UnicodeDecodeError:
            raise CheckpointError(f"{_JINJA}: not UTF-8") from None
    for name in _TEMPLATES:
        templates = settings(side_files, name).get("chat_template") if templates is None else templates
    listed = [{"name": "default", "template": templates}] if isinstance(templates, str) else templates or []
    try:
        return {str(one["name"]): str(one["template"]) for one in listed}
    except (TypeError, KeyError):
        raise CheckpointError(
            f"{CONFIG}: chat_template {shown(templates)}: no text, and no list of named texts"
        ) from None


def _check_special(entries: Mapping[str, tuple[Any, ...]], rows: int, source: str) -> None:
    for name, (value, *_) in entries.items():
        if name.endswith("_token_id") and not (isinstance(value, int) and 0 <= value < rows):
            raise CheckpointError(
                f"{source}: {name.rpartition('.')[2]} is {shown(value)}; the model has rows for 0 to {rows - 1}"
            )


def _padded(entries: Mapping[str, tuple[Any, ...]], n: int) -> dict[str, tuple[Any, ...]]:
    """Add unused tokens, as llama.cpp's converter does."""
    padded = dict(entries)
    if n == 0:
        return padded
    of = package().GGUFValueType
    first = len(padded[_TOKENS][0])
    padded.setdefault(_TYPES, ([NORMAL] * first, of.ARRAY, of.INT32))
    more: dict[str, list[Any]] = {
        _TOKENS: [f"[PAD{first + i}]" for i in range(n)],
        _SCORES: [LEAST] * n,
        _TYPES: [UNUSED] * n,
    }
    for name in more.keys() & padded.keys():
        value, *kinds = padded[name]
        padded[name] = ([*value, *more[name]], *kinds)
    return padded
