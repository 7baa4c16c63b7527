"""Diagnosis that only the paper needs. Its sections are added to those of `loopq diagnose`."""
