"""Output during work and reaction to interrupts: progress, tables, Ctrl-C."""
