"""Layers with codes, products with them on the processor, the runner and text generation."""
