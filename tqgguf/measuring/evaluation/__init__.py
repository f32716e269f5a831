"""What a cache costs in quality."""

import tqgguf.runtime  # noqa: F401  (before mlx)
