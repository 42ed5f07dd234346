"""Which lane of a warp holds what, and what its accesses cost; importing it imports no numpy.

* ``algebra``: layouts (shape:stride).
* ``instruction``, ``fragment``: which lane of a warp holds what; warps' arrangement.
* ``execute``: products from registers to registers; ``chain``: one into the next.
* ``memory``: tiles in shared memory, and wavefronts of its banks.
"""
