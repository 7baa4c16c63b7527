"""Activations of a looped model: which rows each shared layer sees at each recurrence step."""
