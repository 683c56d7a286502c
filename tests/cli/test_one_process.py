"""Many commands in one process, as a notebook or a test may run them: none leaves anything behind."""

import subprocess
import sys

COUNTED = """
import contextlib, gc, io, sys
from memplan.cli.main import run

def one():
    sys.argv = ["memplan", "fit", "gpt2", "--gpu", "h100", "--lora", "--json"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        run()

def left():
    gc.collect()
    return len(gc.get_objects()) + gc.get_freeze_count()

one()
frozen = gc.get_freeze_count()
one()
before = left()
for _ in range(10):
    one()
print(frozen > 0, gc.isenabled(), gc.get_freeze_count(), left() - before)
"""


def test_commands_leave_nothing_behind():
    """The first is frozen, for a process that ends with it; a command leaves some 600 objects, one over all GPUs 600,000."""
    ran = subprocess.run([sys.executable, "-c", COUNTED], capture_output=True, text=True, timeout=120)
    frozen, enabled, count, more = ran.stdout.split()
    assert (frozen, enabled, count) == ("True", "True", "0"), ran.stderr
    assert int(more) < 200
