"""Commands of the `loopq.paper` package."""
