"""Schedules: their declaration, their registry, and those outside the package."""
