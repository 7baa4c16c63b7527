"""Distance of a quantized model from full precision."""
