"""Fifty strings, tokenizers in the files of a hub folder, and llama.cpp's token ids."""

from __future__ import annotations

import json
import lzma
import subprocess

import torch

from tests.support.interop.environments import interpreter

STRINGS = (
    "Hello world", "hello", " leading space", "trailing space ", "Two words. Three more words!", "I'm sure they'd say",
    "We've WE'VE we'Ve don't DON'T", "it's 'quoted' \"twice\"", "The quick brown fox jumps over the lazy dog.",
    "naïve café œuvre Größe", "ABBREVIATIONS and CamelCaseWords", "snake_case __init__ kebab-case", "e-mail: a.b@c.org",
    "https://example.org/a?b=c&d=%20#e", "1", "12", "123", "1234567890", "3.14159e-10", "1,000,000.00 $5 €7 10%",
    "2026-11-27T16:37:00Z", "x1 y22 z333 4444w", "٣٤٥ ½ ² Ⅷ", "for (int i = 0; i < n; ++i) { a[i] += 1; }",
    "def f(x):\n    return x ** 2\n", "\tif (!ok)\n\t\treturn -1;\n", "#include <stdio.h>\n\nint main(void);\n",
    "SELECT * FROM t WHERE a='b';", "<div class=\"x\">&amp;</div>", "{\"a\": [1, 2.5, null], \"b\": {}}",
    "a=b; c!=d; e->f", "...!!!??? ---> <=== ///", "\\n \\t \\\\", "你好世界",
    "日本語のテキスト、カタカナ。", "한국어 텍스트", "Привет, мир!",
    "γειά σου Κόσμε", "مرحبا بالعالم", "שלום עולם", "नमस्ते दुनिया", "สวัสดีชาวโลก", "🙂 👍🏽 👩‍👩‍👧",
    "a  b   c    d     e", "   ", "\n", "\n\n\nline\n\n", "line\r\nline\r\n", "tab\tand\t\ttabs \t x",
    "mixed \n \n  \n end  ",
)  # fmt: skip
#: Server of llama.cpp, asked for the ids of strings.
_PROGRAM = """
import json, sys, urllib.request, xllamacpp
asked, found = json.loads(sys.stdin.read()), []
for path in asked["paths"]:
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel, settings.warmup = path, 64, 1, False
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(settings)
    for string in asked["strings"]:
        body = {"content": string, "parse_special": asked["special"], "add_special": asked["ends"]}
        data, head = json.dumps(body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(server.listening_address + "/tokenize", data, head)
        with urllib.request.urlopen(request, timeout=60) as answer:
            found.append(json.load(answer)["tokens"])
    del server
with open(sys.argv[1], "w") as file:
    json.dump(found, file)
"""


def llama_cpp(folder, paths, strings, *, special=True, ends=False):
    """Ids that llama.cpp gives to strings, one list for each file."""
    asked = {"paths": [str(p) for p in paths], "strings": list(strings), "special": special, "ends": ends}
    said = folder / "ids.json"
    subprocess.run(
        [interpreter("llama"), "-c", _PROGRAM, str(said)],
        input=json.dumps(asked).encode(),
        check=True,
        capture_output=True,
    )
    ids, n = json.loads(said.read_text()), len(asked["strings"])
    return [ids[i : i + n] for i in range(0, len(ids), n)]


def model(folder, n_rows, files, **config):
    """Folder of a tiny Llama, with tokenizer files as text or bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(1)
        shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        llama = LlamaForCausalLM(LlamaConfig(vocab_size=n_rows, num_key_value_heads=1, **shape | config))
    llama.half().save_pretrained(folder)
    for name, data in files.items():
        (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    return folder


def published(data_folder, name):
    """Tokenizer files of a published model."""
    folder = data_folder / "tokenizers" / name
    if (folder / "tokenizer.model").is_file():
        return {"tokenizer.model": (folder / "tokenizer.model").read_bytes()}
    if (folder / "tokenizer.json.xz").is_file():
        return {"tokenizer.json": lzma.decompress((folder / "tokenizer.json.xz").read_bytes())}
    import tokenizers

    tokenizer = tokenizers.ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return {"tokenizer.json": tokenizer.to_str()}


def of_bytes(patterns, *, whole_words=False, n=900):
    """A tokenizer.json of bytes. Its merges were found without its patterns, so they cross the cuts."""
    import tokenizers
    from tokenizers import models, pre_tokenizers, trainers

    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = level
    trainer = trainers.BpeTrainer(
        vocab_size=n, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=["<|end|>"],
    )  # fmt: skip
    tokenizer.train_from_iterator(STRINGS * 3, trainer)
    cuts = [pre_tokenizers.Split(tokenizers.Regex(p), "isolated") for p in patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, level])
    data = json.loads(tokenizer.to_str())
    data["model"]["ignore_merges"] = whole_words
    return json.dumps(data)


def of_pieces(tokens, scores, kinds, **parts):
    """A tokenizer.json of the tokens of a SentencePiece file, as transformers converts it."""
    ids = {text: i for i, text in enumerate(tokens)}
    pairs = [
        (-scores[i], ids[text[:k]], ids[text[k:]], text[:k], text[k:])
        for i, text in enumerate(tokens)
        if kinds[i] == 1
        for k in range(1, len(text))
        if text[:k] in ids and text[k:] in ids
    ]
    added = [
        {"id": i, "content": text, "special": True, "normalized": False, "lstrip": False, "rstrip": False,
         "single_word": False}
        for i, text in enumerate(tokens) if kinds[i] in (2, 3)
    ]  # fmt: skip
    bpe = {
        "type": "BPE", "vocab": ids, "merges": [[a, b] for *_, a, b in sorted(pairs)], "unk_token": "<unk>",
        "byte_fallback": True, "fuse_unk": True, "dropout": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "ignore_merges": False,
    }  # fmt: skip
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "pre_tokenizer": None,
        "normalizer": None, "post_processor": None, "decoder": None, **parts, "model": bpe,
    })  # fmt: skip
