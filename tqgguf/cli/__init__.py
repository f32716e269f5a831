"""The command line: one module per verb. Parses, prints, sets the exit status; no arithmetic, no MLX at import."""
