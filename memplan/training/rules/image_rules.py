"""What a config cannot say of the images in its rows."""

from __future__ import annotations

from collections.abc import Iterator

from memplan.catalog.config_keys.method_keys import Images

Path = tuple[str, ...]
MOST_IMAGES, MOST_SIDE, MOST_PIXELS = 2**12, 2**14, 2**28
"""No row holds more images, and no image has more pixels each way, or in all; more is a slip."""

UNSAID = "an image's height and width, such as 448, or its pixels"


def image_problems(images: Images) -> Iterator[tuple[Path, str]]:
    """Yield what of a config's images is out of range, missing, or said twice."""
    if not 0 <= images.per_row <= MOST_IMAGES:
        yield ("images", "per_row"), f"expected a whole number from 0 to {MOST_IMAGES:,}, got {images.per_row}"
    for name, most in (("height", MOST_SIDE), ("width", MOST_SIDE), ("pixels", MOST_PIXELS)):
        given = getattr(images, name)
        if given is not None and not 1 <= given <= most:
            yield ("images", name), f"expected a whole number from 1 to {most:,}, got {given}"
    sides = [side for side in (images.height, images.width) if side is not None]
    if sides and images.pixels is not None:
        yield ("images", "pixels"), "height and width say how many pixels an image has; leave it out"
    elif len(sides) == 1:
        yield ("images", "height"), f"rows with images need {UNSAID}"
    elif sides and not images.per_row:
        yield ("images", "per_row"), "rows hold text alone; say how many images each row has, such as 1"
