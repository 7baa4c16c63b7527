"""Recurrences outside transformers: quantized transitions compared with other quantized parts."""
