"""A diagnosis as one page that opens offline, and as JSON."""
