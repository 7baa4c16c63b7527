"""Plugins that run checkpoints in transformers, vLLM and lm-evaluation-harness."""
