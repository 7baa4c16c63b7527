"""Distance of a quantized model from full precision, and the statistics of such measurements."""
