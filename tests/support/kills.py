"""Runs that are killed in the middle, and calls that are counted."""

from __future__ import annotations


class Kill(Exception):
    """Stands for a kill in the middle."""


class Killer:
    """Progress that stops the work at the n-th unit."""

    def __init__(self, at):
        self.left = at

    def start(self, label, total, unit):
        pass

    def advance(self, n=1):
        self.left -= n
        if self.left < 0:
            raise Kill

    def stop(self):
        pass

    def note(self, text):
        pass

    def warn(self, text):
        pass


class Counter(Killer):
    """Progress that notes every advance."""

    def __init__(self, seen):
        self.advances = seen

    def advance(self, n=1):
        self.advances.append(n)


def counting(function, seen):
    """The same function, with an entry in `seen` for every call."""

    def wrapper(*args, **kwargs):
        seen.append(1)
        return function(*args, **kwargs)

    return wrapper
