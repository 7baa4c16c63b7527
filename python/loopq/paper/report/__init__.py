"""What the page shows of the paper's sections."""
