"""Values of settings that only the paper's tables need."""
