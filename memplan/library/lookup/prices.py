"""A user's own price file: what an hour of each GPU costs."""

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

from memplan.catalog.catalog import Catalog
from memplan.documents.frozen_values import dataclass
from memplan.documents.loading import load_document
from memplan.errors import MOST_EXPLAINED, InvalidFileError, MemplanError
from memplan.report.largest.largest_model_answer import Prices

MOST_PRICE = 10**6
EXAMPLE = "{currency: USD, prices: {h100-sxm-80gb: 2.49, rtx4090: 0.39}}"


@dataclass(frozen=True, slots=True)
class _Read:
    """Prices as they are read, and what is wrong with them."""

    prices: dict[str, Fraction]
    problems: list[str]


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
    read = _Read({}, list(document.problems))
    if nested:
        read.problems.extend(f"{document.where((k,))}: unknown key" for k in data if k not in ("prices", "currency"))
    for given, value in entries.items():
        if len(read.problems) >= MOST_EXPLAINED:
            break
        where = document.where(("prices", given) if nested else (given,))
        _read_price(read, given, value, where, catalog)
    currency = data.get("currency", "")
    if not isinstance(currency, str) or len(currency) > 12:
        read.problems.append(f"{document.where(('currency',))}: expected a short name such as USD")
    if read.problems:
        raise InvalidFileError(read.problems)
    return Prices(read.prices, str(currency))


def _read_price(read: _Read, given: str, value: object, where: str, catalog: Catalog) -> None:
    """Take up one price, or note what is wrong with it."""
    try:
        name = catalog.gpus.name_of(given)
    except MemplanError as error:
        read.problems.append(f"{where}: {error}")
        return
    number = Fraction(str(value)) if isinstance(value, int | float) and not isinstance(value, bool) else None
    if number is None or not 0 <= number <= MOST_PRICE:
        read.problems.append(f"{where}: expected the price of an hour, a number from 0 to {MOST_PRICE:,}")
    elif name in read.prices:
        read.problems.append(f"{where}: a second price for {name}")
    else:
        read.prices[name] = number
