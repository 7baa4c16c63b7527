"""The adapter that stands on discovery instead of a published class."""
