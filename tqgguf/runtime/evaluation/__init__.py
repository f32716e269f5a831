"""What a cache costs in quality."""
