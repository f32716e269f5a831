"""Weights, and the modules that multiply by them."""
