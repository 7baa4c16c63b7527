"""Settings: declarations and registries, patterns of names, choices of steps, and execution."""
