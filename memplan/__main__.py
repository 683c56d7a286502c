"""``python -m memplan``: the command."""

from memplan.cli.main import run

run()
