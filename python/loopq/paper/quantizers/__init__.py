"""Methods that only the paper's tables need."""
