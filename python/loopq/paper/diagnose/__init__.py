"""The diagnosis that only the paper asks for; its sections join those of `loopq diagnose`."""
