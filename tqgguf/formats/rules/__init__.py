"""What can be wrong with a file: one table of rules."""
