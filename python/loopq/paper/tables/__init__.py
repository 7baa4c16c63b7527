"""Tables and figures of the paper, one file for each experiment."""
