"""Programs of TileLang-Ascend, read without its package: the program runs as Python, with stand-ins for the package's
functions.
"""
