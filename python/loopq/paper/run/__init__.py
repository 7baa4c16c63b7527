"""Calibration inputs that only the paper's tables need."""
