"""The tile program: tiles, operations, rings, phases, and the checks that prove it safe."""
