"""Files that are complete or absent, and checks of data from outside."""
