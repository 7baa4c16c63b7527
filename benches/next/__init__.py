"""Experiments past the uniform grid: per-step corrections, trellis codes, a table of vectors."""
