"""What is known of a combination of settings: its status, and its quality risk as an ordinal.

No number here is invented: a part of a combination (how weights are stored, how gradients are,
which optimizers step) stands as high as the statuses in ``configs/`` say.
"""

from collections.abc import Sequence
from dataclasses import replace

from memplan.catalog.catalog import Catalog
from memplan.catalog.entries import Status
from memplan.documents.frozen_values import dataclass
from memplan.training.learning import BEARS, records_of
from memplan.training.resolution.resolve_config import resolve
from memplan.training.resolved import FLOAT_BYTES, TrainingSetup

STATUSES: tuple[Status, ...] = ("proven", "works", "experimental", "diverges")
"""From the best to the worst; the index is the ordinal of :class:`Standing`."""

UNKNOWN = STATUSES.index("experimental")
FAR_BEHIND = "far behind"
"""Verdict of a record of training whose loss ended more than 12 % above fp32's."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Ordinals of the parts of a combination: 0 proven, 1 works, 2 experimental, 3 diverges."""

    weights: int
    gradients: int
    optimizer: int
    far_behind: bool = False  # Every record of a shipped config with such weights ended far behind fp32
    recorded: bool = False  # A record of training, or the literature, says that exactly this combination learns

    @property
    def rank(self) -> int:
        """The status as an ordinal; within experimental, combinations that were trained come first, weights far behind last."""
        ordinal = STATUSES.index(self.status)
        return 3 * ordinal + (2 if self.far_behind else int(ordinal >= UNKNOWN and not self.recorded))

    @property
    def status(self) -> Status:
        """The worst of the parts: a chain holds where its weakest link does."""
        return STATUSES[max(self.weights, self.gradients, self.optimizer)]

    @property
    def risk(self) -> int:
        """Quality risk: the ordinals added up, and 1 for weights far behind. It orders and measures nothing."""
        return self.weights + self.gradients + self.optimizer + self.far_behind


class Evidence:
    """Statuses of parts, read off the catalog.

    A weight format and a gradient dtype have the best status of any shipped config that trains with
    them, or are experimental where none does. An optimizer has its own status, the worst of those
    that a combination uses. A float format under fp32 master weights counts as fp32, since updates
    are added up in fp32 (https://arxiv.org/abs/1710.03740). A combination that a shipped config
    says diverges does so whatever its parts.

    Args:
        catalog: Whose configs and optimizers count; a user's own among them.
        adapters: Whether weights are frozen under adapters; configs of the other kind say nothing then.
    """

    def __init__(self, catalog: Catalog, adapters: bool) -> None:
        self._optimizers = catalog.optimizers
        self._weights: dict[str, int] = {}
        self._gradients: dict[str, int] = {}
        self._diverging: set[tuple[str, str, str]] = set()
        self._verdicts: dict[str, set[str]] = {}
        self._records = records = records_of(catalog)
        for name, config in catalog.configs.entries.items():
            if (config.adapter is not None) == adapters:
                setup = resolve(config, catalog, name)
                self._learn(setup, setup.config.status)
                if config.evidence and (verdict := records.verdict(config.evidence)):
                    self._verdicts.setdefault(setup.format_names["hidden_matrix"], set()).add(verdict)

    def _learn(self, setup: TrainingSetup, status: Status) -> None:
        rank = _ordinal(status)
        weights, gradients = setup.format_names["hidden_matrix"], gradient_name(setup)
        if status == "diverges":
            self._diverging.add((weights, gradients, setup.optimizer_names["hidden_matrix"]))
            return
        self._weights[weights] = min(rank, self._weights.get(weights, UNKNOWN))
        self._gradients[gradients] = min(rank, self._gradients.get(gradients, UNKNOWN))

    def standing(self, weights: str, formed: str, gradients: str, master: str, optimizers: Sequence[str]) -> Standing:
        """Return how well a combination's parts are known.

        Args:
            weights: Format of hidden matrices.
            formed: Dtype that backward forms their gradients in.
            gradients: Dtype that these are kept in.
            master: Format of master weights, or ``none``.
            optimizers: All that step something, that of hidden matrices first.
        """
        optimizer = max(_ordinal(self._optimizers[name].status) for name in optimizers)
        if (weights, gradients, optimizers[0]) in self._diverging:
            optimizer = STATUSES.index("diverges")
        if FLOAT_BYTES.get(gradients, 0) > FLOAT_BYTES[formed]:
            gradients = formed
        stored = "fp32" if master == "fp32" and weights in FLOAT_BYTES else weights
        far = self._verdicts.get(stored) == {FAR_BEHIND}
        return Standing(self._weights.get(stored, UNKNOWN), self._gradients.get(gradients, UNKNOWN), optimizer, far)

    def recorded(self, standing: Standing, record: str | None) -> Standing:
        """Return a combination's standing with what the record of the whole combination, where there is one, says."""
        verdict = "" if record is None else self._records.verdict(record)
        return replace(standing, recorded=BEARS.get(verdict, verdict) in STATUSES[:UNKNOWN])


def _ordinal(status: Status) -> int:
    """Return the ordinal of a part's status; one that nobody tried counts as experimental."""
    return UNKNOWN if status == "untried" else STATUSES.index(status)


def gradient_name(setup: TrainingSetup) -> str:
    """Return the dtype that gradients of hidden matrices are kept in."""
    weights = setup.format_names["hidden_matrix"]
    own = weights if weights in FLOAT_BYTES else setup.config.compute_dtype
    return setup.config.gradients.dtype or own
