"""Recurrences outside transformers: quantizing a transition against quantizing the rest."""
