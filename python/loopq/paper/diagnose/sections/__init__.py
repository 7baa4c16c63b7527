"""Sections of a diagnosis that the paper adds."""
