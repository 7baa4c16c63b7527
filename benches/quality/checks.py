"""What the quality tables do not show: spikes, defaults, adapters, scores, mixed bits, one plain layer."""

CHECKS = {}


def check_tables(checks, table):
    return []
