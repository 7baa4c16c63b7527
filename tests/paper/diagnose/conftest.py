"""One thread of torch, as for the sections of the product."""

from tests.diagnose.conftest import one_thread

__all__ = ["one_thread"]
