"""Models of this package in other programs."""
