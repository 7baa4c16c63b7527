"""The tables and figures of the paper, one file for each experiment that makes them."""
