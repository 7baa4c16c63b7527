"""Measuring a quantized model against its full-precision self."""
