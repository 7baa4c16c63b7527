"""What a user sees while work goes on: progress, tables, interrupts."""
