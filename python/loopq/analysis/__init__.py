"""Shows loops: the diagnosis, the page and the card. The quantizer imports nothing of it."""
