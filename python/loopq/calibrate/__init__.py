"""Activations of a looped model: input rows of each shared layer at each recurrence step."""
