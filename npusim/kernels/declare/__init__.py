"""Schedules: their declaration, their registry, and schedules from outside the package."""
