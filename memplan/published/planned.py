"""The jobs of the notes, planned: models, setups and cards by catalog name, each once."""

from collections.abc import Callable, Iterator
from functools import cache, cached_property

from memplan.catalog.catalog import Catalog
from memplan.catalog.kernel_profiles import Kernels
from memplan.catalog.training_config import TrainingConfig
from memplan.model.families import model_spec
from memplan.model.inventory import parameter_count
from memplan.model.model import Model
from memplan.model.readers.given_shapes import model_from_shapes
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.plan.sizes.largest_model import ModelsBySize, fewest_devices
from memplan.plan.suggested.suggested_configs import SuggestedConfigs, suggested_configs
from memplan.published.judged_tables import ShapeFigures
from memplan.published.notes_accounting import notes_rules
from memplan.published.table_schema import PublishedFile, Shape
from memplan.training.resolution.resolve_config import resolve
from memplan.training.resolved import TrainingSetup


class Planned:
    """Plans of the notes' jobs."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.model, self.setup, self.plan = cache(self._model), cache(self._setup), cache(self._plan)
        self.models = cache(self._models)
        self.suggestions = cache(self._suggestions)

    def _model(self, name: str) -> Model:
        """Return a model of the catalog."""
        entry = self.catalog.models.entries[name]
        spec = model_spec({**entry.config, "model_type": entry.architecture}, entry.title, f"catalog:{name}")
        return Model.from_spec(spec, f"catalog:{name}")

    def _setup(self, name: str) -> TrainingSetup:
        """Return a shipped config, resolved."""
        return resolve(self.catalog.configs.entries[name], self.catalog, name)

    def _plan(self, model: str, config: str) -> CompiledPlan:
        """Return a catalog model under a shipped config."""
        return CompiledPlan(self.model(model), self.setup(config))

    def device(self, gpu: str, count: int = 1) -> Device:
        """Return a catalog GPU, or several of which the memory is pooled."""
        return Device(self.catalog.gpus.entries[gpu], gpu, count)

    def fits(self, model: str, config: str, device: Device) -> bool:
        """Tell whether a model FITS at micro-batch 1 and sequence 2048, at the upper end of its interval."""
        return self.models(config).fits(model, device)

    def _models(self, config: str) -> ModelsBySize:
        """Return the catalog's models under a shipped config."""
        return ModelsBySize(self.catalog_models, self.setup(config))

    @cached_property
    def catalog_models(self) -> list[tuple[str, Model]]:
        """Names and models of the catalog."""
        return [(name, self.model(name)) for name in self.catalog.models.entries]

    def smallest_card(self, model: str, config: str) -> str | None:
        """Return the notes' card with the least memory on which a model fits, or None."""
        devices = {
            label: self.device(card.gpu, card.count)
            for label, card in notes_rules().cards.items()
            if card.gpu is not None
        }
        ordered = sorted(devices, key=lambda label: devices[label].usable_bytes(0))
        return next((label for label in ordered if self.fits(model, config, devices[label])), None)

    def fewest(self, model: str, config: str, gpu: str) -> int | None:
        """Return the fewest GPUs of a kind that hold a job with their memory pooled, or None."""
        return fewest_devices(self.plan(model, config), self.device(gpu))

    def largest_fitting(self, config: str, device: Device) -> tuple[str, int] | None:
        """Return name and parameters of the largest catalog model that fits, or None."""
        row = self.models(config).largest(device)
        return None if row.largest_fitting is None else (row.largest_fitting, row.largest_fitting_parameters)

    def suggested(self, gpu: str, quantity: str, verdict: Callable[[str], str]) -> str:
        """Return what memplan suggests for a card: configs with their models, or the precision of Newton-Schulz.

        Args:
            quantity: ``config`` or ``precision``.
            verdict: Says what the record of that name found.
        """
        row = self.suggestions(verdict)[gpu]
        if quantity == "precision":
            narrow = " and ".join(name for name, _ in row.faster)
            return row.precision + (f"; {narrow} not measured" if narrow else "")
        chosen = [item for item in (row.established, row.experimental) if item is not None]
        return "; ".join(f"{item.setup.name} ({item.largest_fitting})" for item in chosen)

    def _suggestions(self, verdict: Callable[[str], str]) -> dict[str, SuggestedConfigs]:
        setups = [self.setup(name) for name, entry in self.catalog.configs.entries.items() if entry.adapter is None]
        names = notes_rules().recommended
        rows = suggested_configs(self.catalog_models, setups, [self.device(name) for name in names], verdict)
        return dict(zip(names, rows, strict=True))


# ------------------------------------------------------------------ the shapes of 8-bit Muon
def shape_model(name: str, shape: Shape) -> Model:
    """Return the Llama-like model of the notes' shape."""
    return model_from_shapes(
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        intermediate=shape.intermediate,
        vocab=shape.vocab,
        tied=shape.tied,
        name=name,
    )


def shape_setup(optimizer: str, catalog: Catalog) -> TrainingSetup:
    """Return the setup of their runs: fp32 weights and gradients, Muon on matrices, AdamW in fp32 on the rest.

    Args:
        optimizer: ``muon-fp32`` or ``muon-int8``.
    """
    config = TrainingConfig(
        description="fp32 weights and gradients, Muon on matrices",
        weights={"default": "fp32"},
        compute_dtype="fp32",
        optimizer={"hidden_matrix": optimizer, "default": "adamw-fp32"},
    )
    return resolve(config, catalog, optimizer)


def shape_plan(name: str, shape: Shape, optimizer: str, catalog: Catalog) -> CompiledPlan:
    """Return a shape of the notes under Muon with fp32 or 8-bit momentum."""
    return CompiledPlan(shape_model(name, shape), shape_setup(optimizer, catalog))


def shape_figures(file: PublishedFile, catalog: Catalog) -> Iterator[ShapeFigures]:
    """Yield the shapes of a document under Muon with fp32 and with 8-bit momentum."""
    for name, shape in file.shapes.items():
        for optimizer in ("muon-fp32", "muon-int8"):
            plan = shape_plan(name, shape, optimizer, catalog)
            matrices = [entry for entry in plan.states.tensors if entry.tensor.role == "hidden_matrix"]
            yield ShapeFigures(
                document=file.title,
                shape=name,
                optimizer=optimizer,
                parameters=parameters(plan),
                matrix_parameters=sum(e.tensor.elements * e.tensor.count for e in matrices),
                weight_bytes=plan.states.weight_bytes,
                gradient_bytes=plan.states.gradient_bytes,
                matrix_state_bytes=sum(e.state_bytes * e.tensor.count for e in matrices),
                state_bytes=plan.states.state_bytes,
                persistent_bytes=plan.persistent_bytes,
            )


def parameters(plan: CompiledPlan) -> int:
    """Return the parameters of a plan's model."""
    return parameter_count(plan.model.inventory)


def newton_schulz_setup(dtype: str, catalog: Catalog) -> TrainingSetup:
    """Return Muon as torch.optim.Muon runs it, on weights of a dtype."""
    config = TrainingConfig(
        description="torch.optim.Muon",
        weights={"default": dtype},
        compute_dtype="fp32" if dtype == "fp32" else "bf16",
        optimizer={"hidden_matrix": f"muon-{dtype}", "default": "adamw-fp32"},
        kernels=Kernels(newton_schulz="torch"),
    )
    return resolve(config, catalog, "torch.optim.Muon")
