"""What a file is and holds."""
