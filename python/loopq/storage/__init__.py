"""Files that are complete or absent, and what is read from outside them."""
