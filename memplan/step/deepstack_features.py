"""What a tower hands on to early layers: patches merged behind some of its blocks, added to what these layers return of images' tokens.

Source:
    ``Qwen3VLTextModel._deepstack_process`` in transformers/models/qwen3_vl/modeling_qwen3_vl.py (5.23.0).
"""

from collections.abc import Iterator, Mapping

from memplan.step.alive_around_layers import stream_form
from memplan.step.kernels.image_rows import named_features
from memplan.step.model_on_tape import ModelOnTape
from memplan.step.step_inputs import StepInputs
from memplan.step.tapes.linear_forms import ZERO, Form, Part, Quantity, single_form
from memplan.step.tapes.moments import Instant
from memplan.step.tower.tower_on_tape import TowerOnTape


def handed_back(tower: TowerOnTape | None, layer: int) -> Form:
    """Return the gradients of what blocks of a tower have handed on to this layer, by number from 1, and to those above it."""
    if tower is None or tower.deep is None or not tower.deep.output.needs_gradient:
        return ZERO
    return tower.handed * max(0, len(tower.deep_runs) - layer + 1)


def other_features(inputs: StepInputs, tower: TowerOnTape | None) -> Form:
    """Return by how much what a model has names for of images differs from what the dtypes of its weights tell: norms and adapters in
    fp32 widen a stream, and where the projector saves what the blocks return it is counted there.
    """
    if tower is None or tower.settings.ahead or tower.settings.shape.kind == "pooled":
        return ZERO
    tape, entry = tower.closing.tape, tower.closing.entry
    joined = next(tape.storages[own][2] for item in tape.operations if item.name == "cat" for own in item.makes)
    deep = 0 if tower.deep is None else 2 * len(tower.deep_runs) * tower.deep.output.coefficient
    features = joined + tower.settings.shape.output_size * inputs.setup.residual_bytes + deep
    last = 0 if entry.storage in tape.saved_storages() else entry.coefficient
    told = single_form(Part.ACTIVATIONS, Quantity.PATCHES, last)
    told += single_form(Part.ACTIVATIONS, Quantity.IMAGE_TOKENS, features)
    return told - named_features(inputs.spec, inputs.setup)


def named_output(inputs: StepInputs, taped: ModelOnTape, kind: int) -> Form:
    """Return what the layer before the last of a kind has returned, which keeps its name where images were added to a copy of it."""
    last = max(run.first + run.count - 1 for own, run in zip(taped.kinds, taped.runs, strict=True) if own == kind)
    copied = taped.tower is not None and _copies(inputs) and 0 < last <= len(taped.tower.deep_runs)
    return stream_form(inputs) if copied else ZERO


def _copies(inputs: StepInputs) -> bool:
    """Tell whether images are added to a copy: not so where ms-swift has put a function of its own there."""
    # Source: ``_patch_deepstack_process`` in swift/model/models/qwen.py (ms-swift 4.6.0).
    return inputs.setup.stack.images != "embedded"


def handed_instants(
    inputs: StepInputs, taped: ModelOnTape, left: Mapping[int, Form], around: Form
) -> Iterator[Instant]:
    """Yield the moment at which the last of what is handed on is added: to the rows that a mask chooses of a copy.

    Args:
        left: What a layer of each kind leaves.
        around: What is there before the first layer.
    """
    tower = taped.tower
    if tower is None or tower.deep is None:
        return
    reached = len(tower.deep_runs)
    for kind, run in zip(taped.kinds, taped.runs, strict=True):
        around += left[kind] * max(0, min(run.count, reached - run.first))
    width, own = inputs.spec.hidden_size * inputs.setup.residual_bytes, tower.deep.output.coefficient
    rows = 2 * width + (width if own != width else 0)  # those chosen, the sum, and what is handed on where it is cast
    chosen = single_form(Part.TEMPORARIES, Quantity.IMAGE_TOKENS, rows)
    yield Instant(
        "forward",
        "add what a block of the tower has handed on",
        around + stream_form(inputs) * (1 + _copies(inputs)) + chosen,
    )
