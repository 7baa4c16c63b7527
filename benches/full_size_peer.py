"""llm-compressor on the model of `benches.full_size`, in its own environment: that bench runs this one (`--peer`).

`python -m benches.full_size_peer MODEL PROMPTS.npy QUANTIZED [--n-steps N]` quantizes the layers that loopq's
checkpoint QUANTIZED has, at the same bits and in its groups or the largest that divide every row, by `oneshot` with
pipeline "basic", which sums over all calls of a weight. Loading counts, writing a file does not.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch
import transformers
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from torch.utils.data import DataLoader
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from benches.quality.peer import Processor
from loopq.formats.native import read_index


def main() -> None:
    """Load, calibrate and quantize."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("quantized", type=Path)
    parser.add_argument("--n-steps", type=int)
    args = parser.parse_args()
    config = transformers.AutoConfig.from_pretrained(args.model, trust_remote_code=True)
    auto = getattr(config, "auto_map", {}).get("AutoModelForCausalLM")
    if auto is not None:
        kind = get_class_from_dynamic_module(auto, str(args.model))
        if isinstance(kind._tied_weights_keys, list):
            # transformers 5 asks to which weight a head is tied; Huginn's code is of before.
            kind._tied_weights_keys = dict.fromkeys(kind._tied_weights_keys, "transformer.wte.weight")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, trust_remote_code=True, dtype=torch.bfloat16
    )
    layers = read_index(args.quantized).layers
    (bits,), (wanted,) = {layer.bits for layer in layers}, {layer.group_size for layer in layers}
    # Of a row that is no whole number of groups llm-compressor refuses the layer: the largest group that divides all.
    group = math.gcd(wanted, *(layer.shape[1] for layer in layers))
    scheme = QuantizationScheme(
        targets=[layer.name.removesuffix(".weight") for layer in layers],
        weights=QuantizationArgs(num_bits=bits, group_size=group, strategy="group", symmetric=True),
    )
    ids = [torch.from_numpy(row[None].astype(np.int64)) for row in np.load(args.prompts)]
    depth = {"num_steps": torch.tensor([args.n_steps])} if args.n_steps else {}
    loader = DataLoader(ids, batch_size=1, collate_fn=lambda x: {"input_ids": x[0], **depth})
    oneshot(
        model=model,
        dataset=loader,
        recipe=GPTQModifier(config_groups={"all": scheme}),
        pipeline="basic",
        processor=Processor(),
    )
    print(f"{len(layers)} layers at {bits} bits, groups of {group}")


if __name__ == "__main__":
    main()
