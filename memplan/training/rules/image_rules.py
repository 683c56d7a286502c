"""Numbers of a training config that are out of range, those of the images in its rows among them."""

from collections.abc import Iterator
from typing import Any

from memplan.catalog.config_keys.method_keys import Images

Path = tuple[str, ...]
MOST_IMAGES, MOST_SIDE, MOST_PIXELS = 2**12, 2**14, 2**28
"""No row holds more images, and no image has more pixels each way, or in all; more is a slip."""

UNSAID = "an image's height and width, such as 448, or its pixels"


def out_of_range(
    part: Any, path: Path, names: tuple[str, ...], most: int, least: int = 1
) -> Iterator[tuple[Path, str]]:
    """Yield the numbers of a part of a config that are given and not from ``least`` to ``most``.

    Args:
        path: The keys that lead to the part.
        names: Keys of the part.
    """
    for name in names:
        given = getattr(part, name)
        if given is not None and not least <= given <= most:
            yield (*path, name), f"expected a whole number from {least} to {most:,}, got {given}"


def image_problems(images: Images) -> Iterator[tuple[Path, str]]:
    """Yield what of a config's images is out of range, missing, or said twice."""
    yield from out_of_range(images, ("images",), ("per_row",), MOST_IMAGES, 0)
    yield from out_of_range(images, ("images",), ("height", "width"), MOST_SIDE)
    yield from out_of_range(images, ("images",), ("pixels",), MOST_PIXELS)
    sides = [side for side in (images.height, images.width) if side is not None]
    if sides and images.pixels is not None:
        yield ("images", "pixels"), "height and width say how many pixels an image has; leave it out"
    elif len(sides) == 1:
        yield ("images", "height"), f"rows with images need {UNSAID}"
    elif sides and not images.per_row:
        yield ("images", "per_row"), "rows hold text alone; say how many images each row has, such as 1"
