"""What the runtime adds to the opening of models."""
