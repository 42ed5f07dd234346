"""Which arithmetic a chip has: probes to run on it, and what explains every bit that it returns."""
