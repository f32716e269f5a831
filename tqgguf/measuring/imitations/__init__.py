"""Caches of other engines, imitated on the float path to be compared with ours. No model needs them to run."""
