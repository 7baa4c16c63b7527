"""Files and rules of inference engines: GGUF, importance for llama.cpp's quantizer, and what each engine refuses."""
