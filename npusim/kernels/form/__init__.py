"""The language of kernels on tiles, and its lowering into phases of named stages."""
