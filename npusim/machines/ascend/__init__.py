"""The decoupled Ascend core group: CUBE and vector cores that meet in global memory."""
