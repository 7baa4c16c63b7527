"""The subword vocabulary of the medium models: a byte-level BPE trained on the training novels alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benches.zoo.corpus import prepare

VOCABULARY = 4096
# Pieces of text that are counted and encoded at a time.
_PIECE = 1 << 18


def train_tokenizer(text: bytes, vocabulary: int = VOCABULARY) -> Tokenizer:
    """Return a byte-level BPE of `vocabulary` tokens for ASCII text; the same text gives the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_pieces(text), trainer, length=len(text) // _PIECE + 1)
    return tokenizer


def _pieces(text: bytes) -> list[str]:
    """Cut a text at blanks, so that no word is split."""
    pieces, start = [], 0
    while start < len(text):
        end = text.find(b" ", start + _PIECE)
        end = len(text) if end < 0 else end
        pieces.append(text[start:end].decode("ascii"))
        start = end
    return pieces


def encode(text: bytes, tokenizer: Tokenizer) -> np.ndarray:
    """Return the token ids of a text, uint16 (n_tokens,)."""
    parts = [np.array(e.ids, dtype=np.uint16) for e in tokenizer.encode_batch(_pieces(text))]
    return np.concatenate(parts)


def prepare_tokens(cache: Path) -> tuple[np.ndarray, np.ndarray, list[str], float]:
    """Return training tokens, held-out tokens (uint16), the held-out novels and the bytes of a held-out token.

    The tokenizer, ``tokenizer.json``, and the packed tokens are kept in `cache`.
    """
    train, held_out, ids = prepare(cache)
    vocabulary = cache / "tokenizer.json"
    if not vocabulary.exists():
        train_tokenizer(train.tobytes()).save(str(vocabulary), pretty=False)
    tokenizer = Tokenizer.from_file(str(vocabulary))
    packed = []
    for name, text in (("train", train), ("held_out", held_out)):
        file = cache / f"{name}_tokens.npy"
        if not file.exists():
            part = file.with_suffix(".part.npy")
            np.save(part, encode(text.tobytes(), tokenizer))
            part.replace(file)
        packed.append(np.load(file, mmap_mode="r"))
    return packed[0], packed[1], ids, len(held_out) / len(packed[1])


def add_tokenizer(cache: Path, folder: Path) -> None:
    """Put the tokenizer of `prepare_tokens` beside a model, in the files that transformers reads."""
    shutil.copy(cache / "tokenizer.json", folder)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings) + "\n", encoding="utf-8")
