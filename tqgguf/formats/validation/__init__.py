"""Is a file sound?"""
