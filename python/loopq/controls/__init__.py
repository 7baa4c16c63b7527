"""Recurrences outside transformers: what quantizing a transition does, and what quantizing the rest does not."""
