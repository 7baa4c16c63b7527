"""What a loop does to its own error: calibration blindness, feedback exposure, sensitivity, stability."""
