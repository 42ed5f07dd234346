"""Published kernels, one file each: the decisions of each are one value, and no other module knows its name."""
