"""Turns a request into a result: inputs, bits, time, and how these depend on assumptions."""
