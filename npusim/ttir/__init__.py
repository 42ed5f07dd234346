"""Triton kernels as tile programs: compiled to TTIR, addresses evaluated, the rest written as a kernel of tiles."""
