"""The largest model for a GPU, and the fewest GPUs for a model."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from itertools import count, takewhile

from memplan.catalog.config_keys.parallel_keys import MAXIMUM_GPUS, Parallel
from memplan.catalog.entries import Gpu
from memplan.catalog.training_config import ALL_LINEAR, ALL_TRAIN
from memplan.documents.frozen_values import dataclass
from memplan.errors import CannotAnswerError, MemplanError
from memplan.model.inventory import parameter_count
from memplan.model.model import Model
from memplan.plan.bytes_per_parameter import bytes_per_parameter, least_bytes_per_parameter
from memplan.plan.job_allowances import devices_for, searched_allowances
from memplan.plan.memory_plan import Device, MemoryPlan
from memplan.plan.planner import CardKind, CompiledPlan, Kernels, card_kind
from memplan.step.kernels.card_support import refuse_unable
from memplan.training.resolved import TrainingSetup
from memplan.training.stack_models import as_trained, built_by, with_model_built
from memplan.units import ceil_div


@dataclass(frozen=True, slots=True)
class LargestModel:
    """The largest model for one device, as a bound and as a real one."""

    device: Device
    setup: TrainingSetup
    bytes_per_parameter: Fraction  # Uniform figure of the config
    # Usable bytes over that figure: an upper bound that leaves out activations, embeddings in other formats, the
    # allocator and the CUDA context.
    max_parameters: int
    largest_fitting: str | None  # Name of the largest catalog model that FITS, or None
    largest_fitting_parameters: int  # Its parameters, or 0
    simulated: bool = False  # Whether its reserve was simulated


def max_parameters(setup: TrainingSetup, device: Device) -> int:
    """Return the most parameters whose states alone fill the device's usable bytes.

    Formula:
        ``floor(usable_bytes / bytes_per_parameter)``
    """
    return int(device.usable_bytes(setup.reserve_bytes) / bytes_per_parameter(setup).total)


def upper_bytes(plan: CompiledPlan, device: Device, requested: int) -> int:
    """Return the upper end of the device total, given the requested peak."""
    allowances = searched_allowances(plan.setup, device, plan.forms.stream_bytes)
    return allowances.upper_bytes(allowances.allocated_bytes(requested, plan.rounding_bytes))


def told(progress: Callable[[int, int], None] | None, parts: int) -> Callable[[], None] | None:
    """Return what tells how many parts are done each time that it is called, or none where nobody listens."""
    done = count(1)
    return None if progress is None else lambda: progress(next(done), parts)


def largest_models(
    models: Sequence[tuple[str, Model]],
    setup: TrainingSetup,
    devices: Sequence[Device],
    simulate: Callable[[MemoryPlan], MemoryPlan] | None = None,
    answered: Callable[[], None] | None = None,
) -> list[LargestModel]:
    """Return the largest of ``models`` for each device, planned at the setup's batch and length.

    Args:
        models: Catalog names and models.
        devices: Devices, each possibly several GPUs whose memory is pooled.
        simulate: Simulates the reserve of a plan; none where a share does.
        answered: Is called when a device is.

    Raises:
        CannotAnswerError: No model can be planned under the setup; the reason for the smallest.
    """
    ordered = ModelsBySize(models, setup)
    ordered.refuse_all()
    rows = []
    for device in devices_for(setup, devices):
        rows.append(ordered.largest(device, simulate))
        if answered is not None:
            answered()
    return rows


class ModelsBySize:
    """Models under one setup, the largest first, each planned once it is asked for and then for all devices.

    Args:
        models: Catalog names and models.
    """

    def __init__(self, models: Sequence[tuple[str, Model]], setup: TrainingSetup) -> None:
        trained = [(name, as_trained(model, setup)) for name, model in models]
        largest_first = sorted((-parameter_count(model.inventory), name, model) for name, model in trained)
        self._setup, self._figure = setup, bytes_per_parameter(setup).total
        least = least_bytes_per_parameter(setup)
        self._largest_first = [(name, -size, _Planned(model, setup, least)) for size, name, model in largest_first]

    def refuse_all(self) -> None:
        """Refuse models of which none can be planned.

        Raises:
            CannotAnswerError: The reason for the smallest.
        """
        planned = [plan for _, _, plan in self._largest_first]
        if planned and all(plan.refusal for plan in planned):
            raise CannotAnswerError(planned[-1].refusal)

    def fits(self, name: str, device: Device) -> bool:
        """Tell whether one of them FITS on a device, or on several with their memory pooled."""
        own = next(plan for known, _, plan in self._largest_first if known == name)
        return own.fits(_Room(self._setup, device, by_share=True), None)

    def largest(
        self, device: Device, simulate: Callable[[MemoryPlan], MemoryPlan] | None = None, least: int = 0
    ) -> LargestModel:
        """Return the largest of them for a device, of those with ``least`` parameters or more; see :func:`largest_models`."""
        setup, room = self._setup, _Room(self._setup, device, by_share=simulate is None)
        large = takewhile(lambda row: row[1] >= least, self._largest_first)
        fitting = (row for row in large if row[2].least_bytes <= room.most_bytes and row[2].fits(room, simulate))
        name, size, plan = next(fitting, (None, 0, None))
        played = plan is not None and plan.played is not None and plan.played.by_share is not None
        return LargestModel(device, setup, self._figure, max_parameters(setup, device), name, size, played)


class _Room:
    """What a device has for a setup, with the allocator's reserve as a share or without any."""

    def __init__(self, setup: TrainingSetup, device: Device, *, by_share: bool) -> None:
        self._setup, self.device, self.usable_bytes = setup, device, device.usable_bytes(setup.reserve_bytes)
        allowances = searched_allowances(setup, device)
        self._allowances = allowances if by_share else replace(allowances, upper_reserve_fraction=Fraction(0))

    @cached_property
    def unable(self) -> bool:
        """Whether the device cannot do something that the setup says, whatever the model is."""
        return _is_unable(self._setup, self.device.gpu)

    @cached_property
    def most_bytes(self) -> int:
        """The most bytes of blocks that fit, workspaces of libraries left out: the inverse of :meth:`Allowances.upper_bytes`."""
        allowances, share = self._allowances, self._allowances.upper_reserve_fraction
        room = (self.usable_bytes - allowances.upper_context_bytes + 1) * share.denominator - 1
        return room // (share.denominator + share.numerator) - allowances.library_bytes

    def holds(self, allocated_bytes: int, stream_bytes: int = 0) -> bool:
        """Tell whether so many bytes of blocks fit, workspaces of libraries left out."""
        if not stream_bytes:
            return allocated_bytes <= self.most_bytes
        allowances = self._allowances
        return allowances.upper_bytes(allocated_bytes + allowances.library_bytes) + stream_bytes <= self.usable_bytes


def _is_unable(setup: TrainingSetup, gpu: Gpu) -> bool:
    try:
        refuse_unable(setup, gpu)
    except MemplanError:
        return True
    return False


class _Planned:
    """A model under a setup, planned once it is asked for and as far as it takes to say whether it fits.

    Args:
        least: What each parameter that trains takes at least, with its gradient and without.

    Attributes:
        played: Its plan whose reserve was simulated last, or none.
    """

    def __init__(self, model: Model, setup: TrainingSetup, least: tuple[Fraction, Fraction]) -> None:
        self._model, self._setup, self._least = model, setup, least
        self.played: MemoryPlan | None = None
        self._job = setup.config.micro_batch_size, setup.config.sequence_length
        self._untaped_bytes: int | None = None
        self._refused: set[CardKind] = set()
        self._saved: dict[Kernels, int] = {}
        self._needed: dict[CardKind, tuple[int, int]] = {}  # not of kernels: those under a mask of padding are others

    @cached_property
    def _planned(self) -> CompiledPlan | MemplanError:
        try:
            return CompiledPlan(self._model, self._setup)
        except MemplanError as error:
            return error

    @cached_property
    def _built(self) -> Model | None:
        """The model as its stack builds it; None where it builds none."""
        with suppress(MemplanError):
            return built_by(self._model, self._setup)
        return None

    @cached_property
    def least_bytes(self) -> int:
        """What it takes at least at the end of the step or of forward, without planning it; 0 for one that is refused."""
        if (built := self._built) is None:
            return 0
        unreached = ("head",) if self._setup.has_value_head else ()  # no gradient comes to it
        trained = (tensor for tensor in built.inventory if tensor.used and not tensor.frozen)
        size = parameter_count([tensor for tensor in trained if tensor.role not in unreached])
        with_gradients, without = self._least
        return max(int(size * with_gradients), int(size * without) + self._least_inputs(built))

    def _least_inputs(self, built: Model) -> int:
        """Return the bytes of what layers are given, which each but the first saves where all layers train on one GPU.

        A norm saves it, a projection behind which the norms are, or a checkpoint; a compiled layer, what attention takes and returns.
        """
        config, (batch, length) = self._setup.config, self._job
        adapted = config.adapter is None or config.adapter.targets == ALL_LINEAR
        staged = config.offload.activations != "none"
        if not adapted or staged or config.parallel != Parallel() or config.freeze != ALL_TRAIN:
            return 0
        layers = max(1, built.spec.num_hidden_layers - 1)
        return layers * batch * length * built.spec.hidden_size * self._setup.residual_bytes

    @property
    def refusal(self) -> str:
        """Why it is not planned; nothing where it is."""
        return "" if isinstance(self._planned, CompiledPlan) else str(self._planned)

    def fits(self, room: _Room, simulate: Callable[[MemoryPlan], MemoryPlan] | None) -> bool:
        """Tell whether it fits; more is sought only where what was found before does."""
        if not room.holds(self.least_bytes) or self._built is None:
            return False
        card = card_kind(room.device.gpu)
        if card in self._refused:
            return False
        try:
            if self._untaped_bytes is None:  # before it is planned, which takes far longer
                setup = with_model_built(self._setup, self._built, self._model)
                if room.unable if setup is self._setup else _is_unable(setup, room.device.gpu):
                    self._refused.add(card)
                    return False
            planned = self._planned
            if isinstance(planned, MemplanError):
                return False
            if not self._fits(planned, room):
                return False
        except MemplanError:
            self._refused.add(card)
            return False
        with suppress(MemplanError):
            return self._fits_whole(planned.on(room.device.gpu), room, simulate)
        return False

    def _fits(self, planned: CompiledPlan, room: _Room) -> bool:
        """Tell whether what it requests fits."""
        if self._untaped_bytes is None:
            self._untaped_bytes = planned.least_bytes(*self._job)
        if not room.holds(self._untaped_bytes):
            return False
        own = planned.on(room.device.gpu)
        kernels = own.kernels
        if kernels not in self._saved:
            self._saved[kernels] = own.saved_bytes(*self._job)
        if not room.holds(self._saved[kernels]):
            return False
        card = card_kind(room.device.gpu)
        if card not in self._needed:
            self._needed[card] = own.upper_requested_bytes(*self._job) + own.rounding_bytes, own.forms.stream_bytes
        return room.holds(*self._needed[card])

    def _fits_whole(self, own: CompiledPlan, room: _Room, simulate: Callable[[MemoryPlan], MemoryPlan] | None) -> bool:
        """Tell whether it fits with what host memory has, and with its reserve simulated where it is."""
        if simulate is None and room.device.host_memory_bytes is None:
            return True
        plan = own.evaluate(room.device)
        if simulate is None or plan.exceeds_host:
            return not plan.exceeds_host
        self.played = simulate(plan)
        return self.played.verdict == "fits"


def fewest_devices(plan: CompiledPlan, device: Device) -> int | None:
    """Return the fewest GPUs of a kind whose pooled memory holds a job, or None if no number does.

    The answer fits, and one GPU fewer does not: what is usable grows by the same amount with each
    GPU and so does what each costs, so that fitting is monotonic in their number.
    """
    plan = plan.on(device.gpu)
    setup = plan.setup
    refuse_parallel(setup)
    if device.host_memory_bytes is not None and plan.evaluate(device).exceeds_host:
        return None  # more GPUs leave the host what it is
    requested = plan.upper_requested_bytes(setup.config.micro_batch_size, setup.config.sequence_length)

    def fits(gpus: int) -> bool:
        several = Device(device.gpu, device.name, gpus)
        return upper_bytes(plan, several, requested) <= several.usable_bytes(setup.reserve_bytes)

    return first_that_fits(fits, 1, MAXIMUM_GPUS, 1)


def least_devices(plan: CompiledPlan, device: Device) -> int:
    """Return how many GPUs of a kind have what a job asks for in bytes of tensors, which no way to share it undercuts."""
    config = plan.setup.config
    requested = plan.on(device.gpu).requested_bytes(config.micro_batch_size, config.sequence_length)
    return ceil_div(requested, device.usable_bytes(plan.setup.reserve_bytes))


def able_devices(plan: CompiledPlan, devices: Sequence[Device]) -> list[Device]:
    """Return the devices that can do all that a plan needs.

    Raises:
        CannotAnswerError: None can; the last one's reason.
    """
    able: list[Device] = []
    for device in devices:
        try:
            plan.on(device.gpu)
        except CannotAnswerError:
            if device is devices[-1] and not able:
                raise
        else:
            able.append(device)
    return able


def first_that_fits(fits: Callable[[int], bool], high: int, most: int, least: int) -> int | None:
    """Double ``high`` until it fits, or halve it while it does and is ``least`` or more, then halve the gap; None for nothing up to ``most``."""
    while not fits(high):
        high *= 2
        if high > most:
            return None
    while (low := high // 2) >= least and fits(low):
        high = low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def refuse_parallel(setup: TrainingSetup) -> None:
    """Refuse a setup that says itself how many GPUs it is for.

    Raises:
        CannotAnswerError: It does.
    """
    if setup.config.parallel.gpus > 1:
        raise CannotAnswerError("parallel.data: the number of GPUs is what is searched for; leave it out")
