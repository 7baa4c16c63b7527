"""Quantize, export for other tools, and generate text with four-bit weights."""

import loopq

loopq.quantize("huginn_small", out="Q", group_size=32, levels="even", n_prompts=4)

# compressed-tensors is what transformers, vLLM and SGLang read. The export is read back and compared.
loopq.export("Q", "C", "compressed-tensors")
for measured in loopq.evaluate("huginn_small", ["Q", "C"], n_prompts=4):
    print(f"{measured.name:15} KL {measured.kl.mean():.5f} nats")

# quantized=True keeps the codes in memory and multiplies by them.
loaded = loopq.load("Q", quantized=True)
print("The sea was" + loopq.generate(loaded, "The sea was", n_tokens=20))
