"""Checkpoints: quantized layers and the rest of a model, written whole and read back exactly."""
