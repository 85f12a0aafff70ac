"""Temporary."""
class HFEngine:
    pass
