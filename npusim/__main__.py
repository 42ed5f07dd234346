"""``python -m npusim``: the command line of this package, whichever other ``npusim`` may be on the path."""

from npusim.cli import main

main()
