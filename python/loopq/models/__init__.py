"""Opening a model: embedded, a folder, a hub id, a torch module, a quantized source."""
