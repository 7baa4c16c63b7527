"""How far a quantized model is from the full-precision one."""
