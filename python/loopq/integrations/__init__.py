"""What transformers, vLLM and lm-evaluation-harness run checkpoints by."""
