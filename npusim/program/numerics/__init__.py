"""Values: executes tile programs and compares with float64 attention."""
