"""Keys of a file's tokenizer: rows, special tokens and chat template; and the tokenizer of another file."""

from __future__ import annotations

import json

import pytest

import loopq
from loopq.errors import CheckpointError
from loopq.formats.gguf.pretokens import NAMES
from loopq.formats.gguf.vocabulary import Vocabulary
from tests.support.tokenizers import llama_cpp, model, of_bytes

gguf = pytest.importorskip("gguf", reason="NOT RUN: gguf is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="NOT RUN: tokenizers is not installed")
ROWS = 320


def text(n=300):
    return json.loads(of_bytes(next(iter(NAMES))[0], n=n))


def read(files, n_rows=ROWS, given=None, **config):
    side = {name: json.dumps(data).encode() for name, data in files.items()}
    return Vocabulary.of(side, {"vocab_size": n_rows, **config}, given)


def values(written):
    return {name.removeprefix("tokenizer."): entry[0] for name, entry in written.entries.items()}


def vocabulary(path, tokens, **ids):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["a b"])
    for name, i in ids.items():
        getattr(writer, f"add_{name}_token_id")(i)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.close):
        write()
    return path


def test_the_list_is_padded_to_the_rows_of_the_model():
    entries = values(read({"tokenizer.json": text()}))
    assert (
        entries["ggml.tokens"][299:302]
        != entries["ggml.tokens"][300:303]
        == [f"[PAD{i}]" for i in (300, 301, 302)]
    )
    assert len(entries["ggml.tokens"]) == len(entries["ggml.token_type"]) == ROWS
    assert entries["ggml.token_type"][298:302] == [1, 1, 5, 5]
    assert "padded to 320 rows" in read({"tokenizer.json": text()}).notes[0]
    with pytest.raises(CheckpointError, match=r"300 tokens for the 299 rows of the model"):
        read({"tokenizer.json": text()}, 299)


def test_special_tokens_are_named_by_text_before_number():
    files = {"tokenizer.json": text(), "tokenizer_config.json": {"eos_token": {"content": "<|end|>"}}}
    entries = values(read(files, eos_token_id=7, bos_token_id=[5, 6], pad_token_id=-1))
    assert entries["ggml.eos_token_id"] == 0
    assert entries["ggml.bos_token_id"] == 5
    assert "ggml.padding_token_id" not in entries
    with pytest.raises(CheckpointError, match=r"eos_token_id is 999; the model has rows for 0 to 319"):
        read({"tokenizer.json": text()}, eos_token_id=999)


def test_tokens_around_a_text_are_those_of_the_original(tmp_path):
    ends = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|end|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [0], "tokens": ["<|end|>"]}},
    }
    data = text() | {"post_processor": ends}
    entries = values(read({"tokenizer.json": data}, bos_token_id=0, eos_token_id=0))
    assert entries["ggml.add_bos_token"]
    assert not entries["ggml.add_eos_token"]
    with pytest.raises(
        CheckpointError, match=r"puts tokens \[0\] before a text, and llama\.cpp only bos \(3\)"
    ):
        read({"tokenizer.json": data}, bos_token_id=3)
    config = {"add_bos_token": False}
    asked = values(read({"tokenizer.json": data, "tokenizer_config.json": config}, bos_token_id=0))
    assert not asked["ggml.add_bos_token"]
    loopq.export(
        model(tmp_path, ROWS, {"tokenizer.json": json.dumps(data)}, bos_token_id=0),
        tmp_path / "m.gguf",
        "gguf",
    )
    (plain,), (whole,) = (
        llama_cpp(tmp_path, [tmp_path / "m.gguf"], ["ab"], ends=e)[0] for e in (False, True)
    )
    assert whole == [0, *plain]


def test_chat_templates_are_copied():
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    files = {"tokenizer.json": text(), "tokenizer_config.json": {"chat_template": named}}
    entries = values(read(files))
    assert entries["chat_template"] == "D"
    assert entries["chat_template.tool_use"] == "T"
    assert entries["chat_templates"] == ["tool_use"]
    side = {"tokenizer.json": json.dumps(text()).encode(), "chat_template.jinja": b"{{ x }}"}
    assert values(Vocabulary.of(side, {"vocab_size": ROWS}, None))["chat_template"] == "{{ x }}"


def test_an_unknown_tokenizer_is_refused_with_advice(tmp_path):
    files = {"tokenizer.json": json.loads(of_bytes([r"\p{N}"], n=300))}
    with pytest.raises(CheckpointError, match=r"llama\.cpp's name of.*is not known; give --vocabulary"):
        read(files)
    assert values(read(files, given="none")) == {"ggml.model": "none"}
    folder = model(tmp_path / "m", ROWS, {"tokenizer.json": json.dumps(files["tokenizer.json"])})
    with pytest.raises(CheckpointError, match="give --vocabulary"):
        loopq.quantize(f"looped:{folder}[0:1]x2", [[1] * 8], out=tmp_path / "q.gguf", write="gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_string_with_other_ids_is_refused():
    data = text()
    data["added_tokens"] += [data["added_tokens"][0] | {"id": 300, "content": "ell", "single_word": True}]
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.json: 'Hello world' gets ids .*; give --vocabulary"
    ):
        read({"tokenizer.json": data})


def test_the_tokenizer_of_another_file_must_fit(tmp_path):
    files = {"tokenizer.json": text()}
    tokens = list(dict(sorted((i, t) for t, i in files["tokenizer.json"]["model"]["vocab"].items())).values())
    same = vocabulary(tmp_path / "same.gguf", tokens, eos=0)
    entries = values(read(files, given=same))
    assert len(entries["ggml.tokens"]) == ROWS
    assert entries["ggml.merges"] == ["a b"]
    assert entries["ggml.token_type"][-1] == 5
    for name, listed, match in (
        ("fewer", tokens[:-1], r"token 299 is nothing, and tokenizer\.json of the model says"),
        (
            "other",
            [*tokens[:50], "zzz", *tokens[51:]],
            r"token 50 is 'zzz', and .* another model's tokenizer",
        ),
        ("more", tokens + [f"t{i}" for i in range(30)], "330 tokens for the 320 rows"),
    ):
        with pytest.raises(CheckpointError, match=match):
            read(files, given=vocabulary(tmp_path / f"{name}.gguf", listed))
    # Without a tokenizer beside the model, only rows can be compared.
    assert len(values(read({}, given=tmp_path / "fewer.gguf"))["ggml.tokens"]) == ROWS
    with pytest.raises(CheckpointError, match="eos_token_id is 999"):
        read({}, given=vocabulary(tmp_path / "eos.gguf", tokens, eos=999))


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (b"\xff", "chat_template.jinja: not UTF-8"),
        (None, "chat_template .*: no text, and no list of named texts"),
    ],
)
def test_a_damaged_chat_template_is_refused(template, said):
    config = {"chat_template": [{"template": "D"}]}
    side = {
        name: json.dumps(data).encode()
        for name, data in {"tokenizer.json": text(), "tokenizer_config.json": config}.items()
    }
    with pytest.raises(CheckpointError, match=said):
        Vocabulary.of(
            side | ({"chat_template.jinja": template} if template else {}), {"vocab_size": ROWS}, None
        )


def test_a_file_without_a_tokenizer_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "bare.gguf", "llama")
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.close):
        write()
    with pytest.raises(CheckpointError, match=r"bare\.gguf: a GGUF without a tokenizer"):
        read({}, given=tmp_path / "bare.gguf")
