"""What a model is told and says: tokens, chat templates, sampling. Without MLX, and loading no BLAS."""
