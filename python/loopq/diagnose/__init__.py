"""How a loop treats weight errors: calibration blindness, feedback exposure, sensitivity, stability."""
