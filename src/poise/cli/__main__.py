"""`python -m poise.cli`."""

from poise.cli import main

main()
