"""Fitment's CPU platform."""

__version__ = "0.1.0"
