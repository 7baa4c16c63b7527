"""A diagnosis of the linear toy."""

from __future__ import annotations

from loopq.analysis.diagnosis.config import DiagnoseConfig

#: Sections of the product; a room may add others.
OURS = ["ranks", "overlap", "ablation", "injection", "feedback", "groups"]


QUICK = DiagnoseConfig(
    n_prompts=2, n_ablation_prompts=2, seeds=(0, 1), group_sizes=(4, -1),
)  # fmt: skip


class Notes:
    """Progress that records its messages."""

    def __init__(self):
        self.notes = []
        self.stages = {}

    def start(self, label, total, unit):
        self.stages[label] = total
        self.label, self.done = label, 0

    def advance(self, n=1):
        self.done += n

    def stop(self):
        assert self.done == self.stages[self.label], self.label

    def note(self, text):
        self.notes.append(text)
