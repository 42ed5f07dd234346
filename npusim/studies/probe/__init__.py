"""The arithmetic of a chip: probes to run on it, and the unit that explains every bit of its outputs."""
