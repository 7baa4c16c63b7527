"""Layers that hold codes, products with them on the processor, the runner and generation."""
