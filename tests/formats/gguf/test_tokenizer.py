"""A model's own tokenizer in a GGUF file: llama.cpp gives the ids of the original."""

from __future__ import annotations

import json

import pytest

import loopq
from loopq.errors import CheckpointError
from loopq.formats.gguf.pretokens import NAMES
from loopq.formats.gguf.sentencepiece import Pieces
from loopq.formats.gguf.tokenizer import Tokenizer
from tests.support.marks import slow_unless
from tests.support.tokenizers import STRINGS, llama_cpp, model, of_bytes, of_pieces, published

gguf = pytest.importorskip("gguf", reason="NOT RUN: gguf is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="NOT RUN: tokenizers is not installed")
METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": False}
ESCAPED = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
PREFIXED = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, ESCAPED]}


def exported(folder, n_rows, files, **options):
    loopq.export(model(folder, n_rows, files), folder / "m.gguf", "gguf", **options)
    return folder / "m.gguf"


def ids_of(text, strings):
    read = tokenizers.Tokenizer.from_str(text if isinstance(text, str) else text.decode())
    return [read.encode(string, add_special_tokens=False).ids for string in strings]


BYTES = {
    "gpt2": (50257, ["<|endoftext|>", "a<|endoftext|>b"]),
    "gpt_neox": (50432, ["a<|endoftext|>b", "<|padding|> c", "x" + " " * 30 + "y"]),
    "smollm": (49152, ["<|im_start|>user\nHi<|im_end|>\n", "<jupyter_text>a <|endoftext|>"]),
}


@pytest.mark.parametrize("name", slow_unless("smollm".__eq__, BYTES))
def test_ids_of_published_tokenizers_of_bytes(tmp_path, data_folder, name):
    (text,) = published(data_folder, name).values()
    n_rows, more = BYTES[name]
    path = exported(tmp_path, n_rows, {"tokenizer.json": text})
    strings = [*STRINGS, *more]
    assert llama_cpp(tmp_path, [path], strings) == [ids_of(text, strings)]


@pytest.mark.parametrize("name", slow_unless("fineweb_8192".__eq__, ["mistral_v1", "fineweb_8192"]))
def test_ids_of_published_sentencepiece_files(tmp_path, data_folder, name):
    """llama.cpp does not normalize text, so it gets the text that the second of them normalizes to."""
    package = pytest.importorskip("sentencepiece", reason="NOT RUN: sentencepiece is not installed")
    (data,) = published(data_folder, name).values()
    processor = package.SentencePieceProcessor(model_proto=data)
    strings = [*STRINGS, "</s> a <s>b"]
    read = Pieces.read(data)
    given = [processor.normalize(s).replace("\u2581", " ") for s in strings] if read.normalizer else strings
    path = exported(tmp_path, len(read.tokens), {"tokenizer.model": data})
    assert llama_cpp(tmp_path, [path], given, special=False) == [processor.encode(strings)]


def test_ids_of_sentencepiece_files_in_tokenizer_json(tmp_path, data_folder):
    (data,) = published(data_folder, "fineweb_8192").values()
    read = Pieces.read(data)
    forms = [{"normalizer": PREFIXED}, {"pre_tokenizer": METASPACE}, {"normalizer": ESCAPED}]
    # The first pieces and all characters are enough, and the package reads them faster.
    chosen = [i for i, text in enumerate(read.tokens) if i < 1500 or len(text) == 1]
    few = [[part[i] for i in chosen] for part in (read.tokens, read.scores, read.kinds)]
    texts = [of_pieces(*few, **form) for form in forms]
    paths, folders = [], [tmp_path / str(k) for k in range(4)]
    for folder, text in zip(folders[:3], texts, strict=True):
        paths.append(exported(folder, len(chosen) + 1, {"tokenizer.json": text}))
    # With both files, types and scores are those of tokenizer.model.
    whole = of_pieces(read.tokens, read.scores, read.kinds, **forms[0])
    paths.append(exported(folders[3], 8200, {"tokenizer.json": whole, "tokenizer.model": data}))
    # Metaspace puts no space before a text that begins with one.
    strings = [string for string in STRINGS if not string.startswith(" ")]
    expected = [ids_of(text, strings) for text in [*texts, whole]]
    assert llama_cpp(tmp_path, paths, strings, special=False) == expected
    assert expected[0] != expected[2]


def test_ids_by_every_known_pattern(tmp_path):
    texts, paths = [], []
    for k, (patterns, whole_words) in enumerate(NAMES):
        texts.append(of_bytes(patterns, whole_words=whole_words))
        paths.append(exported(tmp_path / str(k), 1024, {"tokenizer.json": texts[-1]}))
        assert gguf.GGUFReader(paths[-1]).fields["tokenizer.ggml.pre"].contents() == list(NAMES.values())[k]
    strings = [*STRINGS, "a<|end|>b"]
    expected = [ids_of(text, strings) for text in texts]
    assert llama_cpp(tmp_path, paths, strings) == expected
    assert len({json.dumps(ids) for ids in expected}) > 5


def test_parts_that_llama_cpp_has_no_form_for_are_refused():
    plain = json.loads(of_bytes([r"\p{N}"]))
    known = json.loads(of_bytes(next(iter(NAMES))[0])) | {"added_tokens": []}
    cases = {
        "no form for.*NFKC": known | {"normalizer": {"type": "NFKC"}},
        r"llama\.cpp's name of": plain,
        "llama.cpp has no form for.*Whitespace": known | {"pre_tokenizer": {"type": "Whitespace"}},
        "llama.cpp has no form for.*Prepend": known
        | {
            "normalizer": {"type": "Sequence", "normalizers": [PREFIXED, {"type": "Prepend", "prepend": "x"}]}
        },
        "model 'Unigram'": known | {"model": {"type": "Unigram", "vocab": [["a", 0.0]]}},
    }
    for match, data in cases.items():
        tokenizer = Tokenizer.read({"tokenizer.json": json.dumps(data).encode()})
        assert tokenizer.model == ""
        with pytest.raises(CheckpointError, match=match):
            raise CheckpointError(tokenizer.refusal)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"vocab": {"a": 0, "b": 0}}, "two tokens have the same id"),
        ({"vocab": {"a": -1}}, "allowed: tokens with their ids"),
        ({"vocab": {"a": "0"}}, "allowed: tokens with their ids"),
        ({"merges": [["a"]]}, "not all are two texts"),
        ({"merges": 3}, "merges"),
    ],
)
def test_a_damaged_tokenizer_json_is_named(change, match):
    data = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []} | change}
    with pytest.raises(CheckpointError, match=match):
        Tokenizer.read({"tokenizer.json": json.dumps(data).encode()})


def test_added_tokens_have_their_types():
    text = json.loads(of_bytes(next(iter(NAMES))[0]))
    n = len(text["model"]["vocab"])
    text["added_tokens"] += [{"id": n, "content": "<tool>", "rstrip": True}]
    config = {"added_tokens_decoder": {str(n + 1): {"content": "<|x|>", "special": True}}}
    files = {"tokenizer.json": text, "tokenizer_config.json": config, "added_tokens.json": {"<y>": n + 3}}
    tokenizer = Tokenizer.read({name: json.dumps(data).encode() for name, data in files.items()})
    assert {n: 4, n + 1: 3, n + 3: 4}.items() <= tokenizer.kinds.items()
    assert [tokenizer.texts.get(n + k) for k in range(4)] == ["<tool>", "<|x|>", None, "<y>"]
    assert any("<tool>" in note for note in tokenizer.notes)
    files["added_tokens.json"] = {"<y>": 5}
    with pytest.raises(CheckpointError, match="added token '<y>' has id 5, as has"):
        Tokenizer.read({name: json.dumps(data).encode() for name, data in files.items()})


def test_a_token_id_that_is_no_number_is_refused():
    config = {"added_tokens_decoder": {"one": {"content": "<|x|>"}}}
    files = {"tokenizer.json": json.loads(of_bytes(next(iter(NAMES))[0])), "tokenizer_config.json": config}
    with pytest.raises(CheckpointError, match="added_tokens_decoder: 'one' is no token id"):
        Tokenizer.read({name: json.dumps(data).encode() for name, data in files.items()})
