"""What fits into a memory."""
