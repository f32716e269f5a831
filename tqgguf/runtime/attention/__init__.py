"""Attention from blocks."""
