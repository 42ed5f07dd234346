"""Published kernels, one file each: the decisions of a kernel are one value, and no other module knows the kernel's
name.
"""
