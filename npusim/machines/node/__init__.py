"""Several devices: topology, collectives, host links."""
