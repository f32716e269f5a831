"""Caches of other engines, imitated on the float path to be compared with ours. No model needs them to run.

They are installed all the same: whoever reads a comparison in the documents can repeat it, and there is one program.
"""
