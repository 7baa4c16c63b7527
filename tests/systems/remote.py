"""Stand-ins with the module names and call signatures of the published remote classes."""

CASES: dict[str, tuple] = {}
