"""K or V of one layer."""
