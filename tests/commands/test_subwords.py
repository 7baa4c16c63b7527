"""Every command on a model that has a tokenizer beside it, of a class that is registered for models that read bytes."""

from __future__ import annotations

import json
import logging
import lzma
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from loopq import zoo
from loopq.calibrate.data import TokenSet
from loopq.cli import main
from loopq.layers.loop_spec import LOOP
from loopq.models.load import load_model
from loopq.systems.base import Batch
from tests.support.subwords import subword_folder

FEW = ("--n-prompts", "3", "--seq-len", "24")
SMALL = ("--method", "gptq", "--group-size", "16")


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """Text with letters of two bytes."""
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text(zoo.evaluation_text().decode()[:1500].replace("e", "é"), "utf-8")
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny Huginn of 512 tokens."""
    torch.manual_seed(0)
    return subword_folder(tmp_path_factory.mktemp("subwords") / "model")


@pytest.fixture(scope="module")
def checkpoint(model, texts) -> Path:
    """The result of `loopq quantize` for it."""
    out = model.parent / "q"
    assert main(["quantize", str(model), "--out", str(out), "--calibration", str(texts), *FEW, *SMALL]) == 0
    return out


def test_a_checkpoint_keeps_its_tokenizer_and_used_its_tokens(model, checkpoint, texts):
    assert (checkpoint / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(texts.read_text("utf-8")).ids
    said = json.loads((checkpoint / "loopq.json").read_text())["settings"]["calibration"]
    plain, known = TokenSet(tuple(np.array(ids[:72]).reshape(3, 24)), "text", "windows"), np.arange(512)
    assert said["sha256"] == plain.with_random_tokens(said["random_tokens"], known).digest()


def test_bits_per_byte_are_those_of_the_text_that_is_predicted(model, checkpoint, texts, command):
    measure = ("evaluate", model, checkpoint, "--text", texts, *FEW, "--json")
    full, quantized = json.loads(command(*measure)[1])
    tokenizer, loaded = Tokenizer.from_file(str(model / "tokenizer.json")), load_model(model)
    ids = np.array(tokenizer.encode(texts.read_text("utf-8")).ids[:72]).reshape(3, 24)
    bits = n_bytes = 0.0
    for number, row in enumerate(ids):
        batch = Batch(torch.from_numpy(row)[None], (number,), 0)
        logp = loaded.system.rollout(batch, loaded.system.n_steps)[0].double().log_softmax(-1)
        bits -= sum(float(logp[i, row[i + 1]]) for i in range(23)) / math.log(2)
        # A token that ends within a letter has one byte of it.
        n_bytes += sum(len(tokenizer.id_to_token(int(i))) for i in row[1:])
    assert n_bytes > 1.3 * ids[:, 1:].size
    assert full["bits_per_byte"] == pytest.approx(bits / n_bytes, rel=0.01)
    assert quantized["bits_per_byte"] != full["bits_per_byte"]


@pytest.mark.slow
def test_other_commands_read_its_tokens(model, checkpoint, texts, command, tmp_path):
    code, _, err = command("run", checkpoint, "It was", "--n-tokens", 4)
    assert (code, "transformers" in err) == (0, False)
    n_prompt = len(load_model(model).encode("It was"))
    assert f"{n_prompt} tokens of prompt" in err
    for line in (
        ("check", model),
        ("inspect", checkpoint),
        ("diagnose", model, "--calibration", texts, "--only", "ranks", *FEW, "--group-size", 16),
    ):
        assert command(*line)[0] == 0, line


def test_the_first_commands_need_no_text(model, tmp_path, command):
    code, _, said = command(
        "quantize", model, "--out", tmp_path / "q", *FEW, "--preset", "fast", "--group-size", "16"
    )
    assert code == 0
    assert "mathematics" in said
    code, out, _ = command("evaluate", model, tmp_path / "q", *FEW)
    assert code == 0
    assert "mathematics" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "n_tokens"),
    [
        ("smollm", "PreTrainedTokenizerFast", 49152),
        ("mistral_v1", "LlamaTokenizer", 32000),
        ("gpt2", "GPT2Tokenizer", 50257),
    ],
)
def test_published_tokenizers_need_no_text(name, kind, n_tokens, data_folder, tmp_path, command):
    if name == "mistral_v1":
        pytest.importorskip("sentencepiece")
    model = tmp_path / "model"
    config = transformers.LlamaConfig(
        vocab_size=n_tokens, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(model)
    for path in (data_folder / "tokenizers" / name).iterdir():
        if path.suffix == ".xz":
            (model / path.stem).write_bytes(lzma.decompress(path.read_bytes()))
        else:
            shutil.copyfile(path, model / path.name)
    marks = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} if name == "mistral_v1" else {}
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind, **marks}))
    (model / "config.json").write_text(json.dumps({**config.to_dict(), LOOP: [0, 1, 2]}))
    few = ("--n-prompts", "12")
    code, _, err = command(
        "quantize", model, "--out", tmp_path / "q", "--preset", "fast", *few, "--group-size", "32"
    )
    assert code == 0, err
    assert "12 prompts, 1,536 tokens of loopq's calibration text" in err
    code, out, _ = command("evaluate", model, tmp_path / "q", *few)
    assert code == 0
    assert "12 prompts, 1536 tokens of loopq's evaluation text" in out


def test_a_long_text_is_no_false_alarm(model, texts):
    """A tokenizer warns of texts that exceed the model's length. Here a text is cut after it is encoded."""
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 64}))
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        assert len(load_model(model).encode(texts.read_text("utf-8"))) > 64
    finally:
        logger.removeHandler(handler)
        (model / "tokenizer_config.json").write_text(json.dumps(settings))
    assert not said


def test_a_bad_text_is_refused_before_the_model_is_loaded(checkpoint, tmp_path, command):
    """There is no model. If it were loaded first, its error would come first."""
    none, missing = tmp_path / "no-model", tmp_path / "missing.txt"
    (tmp_path / "empty.jsonl").touch()
    for text in (missing, tmp_path / "empty.jsonl"):
        for line in (
            ("quantize", none, "--out", tmp_path / "q", "--calibration", text),
            ("quantize", none, "--out", tmp_path / "q", "--evaluate", text),
            ("collect", none, "--out", tmp_path / "d", "--calibration", text),
            ("diagnose", none, "--calibration", text),
            ("evaluate", none, checkpoint, "--text", text),
        ):
            code, _, err = command(*line)
            assert code != 0, line
            assert text.name in err, line


def test_a_short_text_is_said(model, texts, checkpoint, tmp_path, command):
    short = ("--seq-len", 24, *SMALL)
    code, _, err = command("quantize", model, "--out", tmp_path / "q", "--calibration", texts, *short)
    assert code == 0
    assert "128 prompts were asked for" in err
    _, _, err = command("evaluate", model, checkpoint, "--text", texts, "--seq-len", 24)
    assert "64 prompts were asked for" in err
