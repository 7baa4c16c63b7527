"""Effects of weight errors in a loop: calibration blindness, feedback exposure, sensitivity and stability."""
