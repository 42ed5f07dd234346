"""A tile program and its two meanings: `ir` describes it, `numerics` executes its values, `timing` its cycles."""
