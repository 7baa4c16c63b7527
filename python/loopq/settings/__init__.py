"""Declarations, registries, name patterns and step choices of settings, and settings of execution."""
