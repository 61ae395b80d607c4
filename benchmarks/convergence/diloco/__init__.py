"""lc.DiLoCoX, and other methods that talk seldom."""
