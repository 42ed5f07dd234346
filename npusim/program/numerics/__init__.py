"""Values: executes tile programs and compares the results with float64 attention."""
