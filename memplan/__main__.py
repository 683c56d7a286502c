"""``python -m memplan``: the command."""

from memplan.cli.completion import run

run()
