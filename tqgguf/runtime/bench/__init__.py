"""What a cache costs in time and memory."""
