"""Quantize a torch module with a loop of your own, and measure the KL divergence to the original."""

import torch
from torch import nn

import loopq


class MyLoop(nn.Module):
    """A byte-level model that applies one block four times."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        state = self.embed(ids)
        for _ in range(4):
            state = state + self.down(torch.relu(self.up(state)))
        return self.head(state)


torch.manual_seed(0)
model = MyLoop()
prompts = torch.randint(0, 256, (16, 32)).numpy()  # your calibration text, as token ids
held_out = torch.randint(0, 256, (8, 32)).numpy()

# One run shows which weights are called more than once: `up` and `down`, four times each.
variants = {bits: loopq.quantize(model, prompts, bits=bits, group_size=32) for bits in (4, 3)}
print(*variants[4].layers, sep="\n")
for measured in loopq.evaluate(model, {f"{b} bits": q for b, q in variants.items()}, held_out):
    print(f"{measured.name:15} KL {measured.kl.mean():.6f} nats, agreement {measured.agreement.mean():.1%}")
