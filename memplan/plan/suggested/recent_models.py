"""Which released models are recent enough to be recommended."""

from collections.abc import Mapping

RECENT_MONTHS = 18
"""How much older than the newest model of a catalog a model may be to be recommended."""


def recent_models(released: Mapping[str, str | None]) -> tuple[list[str], str]:
    """Return the models that are recent enough to be recommended, and the month since when.

    Args:
        released: Name -> day or month of the release, such as ``2025-04``; one without is recent, for its owner added it.

    Example:
        >>> recent_models({"a": "2026-02-05", "b": "2024-08", "c": "2024-07", "mine": None})
        (['a', 'b', 'mine'], '2024-08')
    """
    newest = max((date[:7] for date in released.values() if date), default="")
    if not newest:
        return list(released), ""
    year, month = divmod(12 * int(newest[:4]) + int(newest[5:7]) - 1 - RECENT_MONTHS, 12)
    since = f"{year}-{month + 1:02d}"
    return [name for name, date in released.items() if not date or date[:7] >= since], since
