"""Programs of TileLang-Ascend: flags and barriers."""
