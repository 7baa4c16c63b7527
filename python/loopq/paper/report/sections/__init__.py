"""Figures and tables of the sections that the paper adds, one file each."""
