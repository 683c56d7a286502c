"""``memplan recommend``: which config and which Newton-Schulz precision, for each GPU."""

from __future__ import annotations

from typing import Annotated

from memplan.cli.grouped_command import command, without
from memplan.cli.option_groups import DeviceOptions, OutputOptions
from memplan.cli.output import emit
from memplan.cli.training_options import TrainingOptions
from memplan.library.lookup import catalog_model, find_devices, find_setup


@command(example="memplan recommend --gpu rtx4090")
def recommend_command(
    device: Annotated[DeviceOptions, without("profile")],
    training: Annotated[
        TrainingOptions, without("config", "qlora", "lora", "full", "lora_rank", "optimizer", "settings")
    ],
    output: OutputOptions,
) -> int:
    """What should I train with on this GPU? The config that holds the most, and the precision of Newton-Schulz.

    Derived from the catalog and the evidence; what no measurement covers is said. Without --gpu: every GPU.
    """
    catalog = output.catalog()
    devices = find_devices(device.gpu, device.gpu_memory, device.gpus, catalog)
    names = [name for name, config in catalog.configs.entries.items() if config.adapter is None]
    setups = [find_setup(name, training.overrides(), catalog) for name in names]
    models = [(name, catalog_model(name, catalog)) for name in catalog.models]
    from memplan.catalog.recorded_rows import Records
    from memplan.plan.suggested_configs import suggested_configs
    from memplan.report.experiments import shipped_record
    from memplan.report.plans.recommend_answer import recommend_document

    found = suggested_configs(models, setups, devices, Records(catalog.root).verdict)
    evidence = catalog.root / "configs" / "evidence"
    precision, on_gpu = (shipped_record(name, evidence) for name in ("precision", "precision-h200"))
    return emit(recommend_document(found, setups[0], precision, on_gpu, output.unit), output)
