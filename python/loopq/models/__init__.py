"""Open a model from any source, such as a folder, a hub id, a torch module or a quantized checkpoint."""
