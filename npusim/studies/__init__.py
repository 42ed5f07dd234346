"""Questions that take many runs: searches, rankings, worst inputs, comparisons with measurements."""
