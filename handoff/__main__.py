"""`python -m handoff` is the `handoff` command."""

from handoff.cli import main

main()
