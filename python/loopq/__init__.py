"""Quantizer for looped (recurrent-depth) transformers."""
