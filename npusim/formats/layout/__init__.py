"""The distribution of tiles over the lanes of a warp, and the cost of its accesses; importing it imports no numpy.

* ``algebra``: layouts (shape:stride).
* ``instruction``, ``fragment``: the elements of each lane; the arrangement of warps.
* ``chain``: the result of one product as the operand of the next.
* ``wavefronts``: tiles in shared memory, and wavefronts of its banks.
"""
