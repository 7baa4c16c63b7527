"""Diagnosis sections that the paper adds."""
