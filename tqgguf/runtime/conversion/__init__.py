"""Models for others and from others."""
