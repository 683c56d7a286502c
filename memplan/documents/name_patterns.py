"""Regular expressions from outside that select parameters or modules by name: compiled only where matching takes no time."""

import re
import warnings
from collections.abc import Iterable
from math import factorial, prod

MOST_CHARACTERS = 300
MOST_STEPS = 100_000
"""Steps of matching one name, of all patterns together: at most a millisecond, where a model has a thousand names."""
NAME_CHARACTERS = 64
"""Of a name of a parameter, the longest of which are about as long; what can match them all is tried with each."""
CALL_STEPS = 64.0
"""That a search takes as long as, however little is matched."""
NUMBER_CHARACTERS = 3
"""Of a layer's number, which is all that digits match."""

_TOKEN = re.compile(
    r"""
    (?P<digits>\\d|\[(?:\\d|0-9)+\])
    | \\. | \[\^?\]?(?:\\.|[^\]\\])*\]
    | \(\?(?:P?<\w+>)? | (?P<open>\() | (?P<close>\)) | (?P<either>\|)
    | (?P<repeat>(?P<count>[*+?]|\{\d*(?:,\d*)?\})[+?]?) | .
    """,
    re.VERBOSE | re.DOTALL,
)


def name_pattern(pattern: str) -> re.Pattern[str]:
    """Return a pattern that is searched for in names.

    Raises:
        ValueError: It is no regular expression, or matching it could take long; its text says which.

    Example:
        >>> name_pattern("layers.[0-9]+.mlp").search("model.layers.3.mlp.up_proj.weight") is not None
        True
        >>> name_pattern(".?" * 30)
        Traceback (most recent call last):
        ...
        ValueError: could take long to match; use several shorter ones
    """
    if len(pattern) > MOST_CHARACTERS or matching_steps(pattern) > MOST_STEPS:
        raise ValueError("could take long to match; use several shorter ones")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sets within sets, which mean what they mean today
            return re.compile(pattern)
    except (re.error, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"is no regular expression: {error}") from None


def take_long(patterns: Iterable[str]) -> bool:
    """Tell whether matching all of several patterns could take long where each of them does not."""
    return sum(map(matching_steps, patterns)) > MOST_STEPS


def matching_steps(pattern: str) -> float:
    """Return how many steps searching a name could take at most: ways through a pattern, which begin anywhere.

    Repeats of single characters, and what is before them, share a name out among themselves; a repeated group could take any
    number of steps, and what is repeated last takes none of them back.

    Example:
        >>> matching_steps("^lm_head"), matching_steps("embed"), matching_steps("(a|b)*")
        (64.0, 64.0, inf)
    """
    ways, wide, choices = 1.0, 0, [1]
    before = ""
    for token in _TOKEN.finditer(pattern.removesuffix(".*")):
        if token["repeat"] is not None:
            tried = _tried(token["count"])
            if before == "close" and token["count"] != "?":
                return float("inf")
            if before == "digits":
                ways *= min(tried, NUMBER_CHARACTERS)
            elif tried >= NAME_CHARACTERS:
                wide += 1
            else:
                ways *= tried
        elif token["either"] is not None:
            choices[-1] += 1
        elif token["open"] is not None or token[0].startswith("(?") or token["close"] is not None:
            choices.append(1)
        before = "digits" if token["digits"] is not None else "close" if token["close"] is not None else ""
    if not pattern.startswith("^"):
        wide += 1  # a search begins anywhere
    steps = min(ways * prod(map(float, choices)), 1e300) * NAME_CHARACTERS**wide / factorial(wide)
    return max(float(steps), CALL_STEPS)


def _tried(count: str) -> int:
    """Return how many lengths a repeat could have."""
    if count in "*+":
        return NAME_CHARACTERS
    if count == "?":
        return 2
    least, comma, most = count[1:-1].partition(",")
    if not comma:
        return 1
    return min(NAME_CHARACTERS, int(most[:9]) - int(least[:9] or 0) + 1 if most else NAME_CHARACTERS)
