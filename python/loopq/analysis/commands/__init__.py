"""Commands that show loops."""
