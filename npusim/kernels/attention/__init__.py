"""Parts that all attention kernels share: blocks, masks, functions of scores, stored K and V, splits."""
