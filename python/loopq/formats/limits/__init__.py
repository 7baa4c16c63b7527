"""Limits of engines: one module for each kind. `LIMITS` in `loopq.formats.rules` lists all."""
