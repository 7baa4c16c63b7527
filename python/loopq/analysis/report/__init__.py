"""Reports: a diagnosis as a page that opens offline, and as JSON."""
