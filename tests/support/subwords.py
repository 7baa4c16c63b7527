"""A tiny model with tokens longer than a byte, and its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benches.zoo.store import save_model
from loopq import zoo
from tests.support.systems import small

#: 256 bytes and as many pairs of tokens.
VOCABULARY = 512


def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE of the text that ships with loopq."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([zoo.calibration_text().decode()], trainer)
    return tokenizer


def subword_folder(folder: Path, kind: str = "huginn") -> Path:
    """Write a tiny untrained model of a class that is registered for bytes, and a tokenizer beside it."""
    save_model(small(kind, vocab_size=VOCABULARY, block_size=64)(), folder)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    settings = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    (folder / "tokenizer_config.json").write_text(settings)
    return folder


def dense_folder(folder: Path) -> Path:
    """Write a tiny Llama with a loop, and a tokenizer of transformers with marks, padding and a chat template."""
    import torch
    from tokenizers.processors import TemplateProcessing
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=VOCABULARY + 2, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, bos_token_id=VOCABULARY, eos_token_id=VOCABULARY + 1, pad_token_id=VOCABULARY + 1,
    )  # fmt: skip
    config.looped_layers = [1, 2, 2]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    inner = tiny_tokenizer()
    inner.add_special_tokens(["<s>", "</s>"])
    inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", VOCABULARY)])
    PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="</s>",
        chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    ).save_pretrained(folder)  # fmt: skip
    return folder
