"""Commands that run checkpoints."""
