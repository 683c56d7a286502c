"""A user's own price file: what an hour of each GPU costs."""

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

from memplan.catalog.catalog import Catalog
from memplan.documents.loading import load_document
from memplan.errors import MOST_EXPLAINED, InvalidFileError, MemplanError
from memplan.report.largest.largest_model_answer import Prices

MOST_PRICE = 10**6
EXAMPLE = "{currency: USD, prices: {h100-sxm-80gb: 2.49, rtx4090: 0.39}}"


def load_prices(path: Path, catalog: Catalog) -> Prices:
    """Return the prices in a YAML or JSON file: GPU -> price of an hour, under ``prices`` or on top.

    Raises:
        InvalidFileError: Every unknown GPU and every price that is no number at once.
    """
    document = load_document(path)
    data = document.data
    if not isinstance(data, Mapping) or not data:
        raise InvalidFileError([f"{document.name}:1: expected GPUs and prices, such as {EXAMPLE}", *document.problems])
    nested = "prices" in data
    entries = data["prices"] if nested else {name: value for name, value in data.items() if name != "currency"}
    if not isinstance(entries, Mapping):
        raise InvalidFileError([f"{document.where(('prices',))}: expected GPUs and prices, such as {EXAMPLE}"])
    prices: dict[str, Fraction] = {}
    problems = list(document.problems)
    if nested:
        problems.extend(f"{document.where((k,))}: unknown key" for k in data if k not in ("prices", "currency"))
    for given, value in entries.items():
        if len(problems) >= MOST_EXPLAINED:
            break
        try:
            name, price = catalog.gpus.name_of(given), _price(value)
            if name in prices:
                raise InvalidFileError([f"a second price for {name}"])
            prices[name] = price
        except MemplanError as error:
            problems.append(f"{document.where(('prices', given) if nested else (given,))}: {error}")
    currency = data.get("currency", "")
    if not isinstance(currency, str) or len(currency) > 12:
        problems.append(f"{document.where(('currency',))}: expected a short name such as USD")
    if problems:
        raise InvalidFileError(problems)
    return Prices(prices, str(currency))


def _price(value: object) -> Fraction:
    """Return the price of an hour."""
    number = Fraction(str(value)) if isinstance(value, int | float) and not isinstance(value, bool) else None
    if number is None or not 0 <= number <= MOST_PRICE:
        raise InvalidFileError([f"expected the price of an hour, a number from 0 to {MOST_PRICE:,}"])
    return number
