"""Commands of the paper's room."""
