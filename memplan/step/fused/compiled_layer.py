"""A decoder layer that torch compiles by itself: what its programs have alive, kernel by kernel, in the order that the compiler chose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

from memplan.catalog.training_config import CheckpointedLayers
from memplan.errors import CannotAnswerError
from memplan.model.spec import Attention, Mlp, ModelSpec
from memplan.step.fused.layer_programs import LayerPrograms, LayerShape, dtypes, layer_programs
from memplan.step.playing.section import SavedTensor
from memplan.step.states.parallel_shards import is_sharded
from memplan.step.tapes.kernel_order import Program, Schedule, schedule
from memplan.step.tapes.linear_forms import ZERO, Form, Part, Quantity, single_form
from memplan.step.tapes.played import Instant, Played, dominant
from memplan.step.tapes.taped_weight import Mode
from memplan.training.resolved import TrainingSetup
from memplan.values import dataclass

Orders = tuple[Schedule, ...]
"""Of a layer's forward, and of its backward."""

KERNELS = ("flash", "cudnn", "flex")
LOSSES = ("fp32", "chunked-backward")
"""Those of torchtitan's own, which it compiles."""
FUSED_KERNELS = ("norm", "rotary", "activation")
"""Operations of which a compiler makes kernels of its own."""
ALIGNED = 8
"""Elements of 16 bits that rows of products are a multiple of, or the compiler times whether longer ones are faster
(``get_alignment_size`` in torch/_inductor/fx_passes/pad_mm.py, v2.13.0)."""


@dataclass(frozen=True, slots=True)
class CompiledLayer:
    """The programs of one layer, and the orders that their kernels run in."""

    shape: LayerShape
    orders: Orders

    def played(self, mode: Mode) -> Played:
        """Return what is alive while the layer runs forward and backward.

        Args:
            mode: What becomes of gradients: all but the ``first`` are added to earlier ones once all of the layer's are there.
        """
        return _played(self, mode)

    @property
    def saved_tensors(self) -> tuple[SavedTensor, ...]:
        """What forward leaves for backward, tensor by tensor."""
        return tuple((name, *self.programs.sizes[name], Part.ACTIVATIONS) for name in self.programs.saved)

    @property
    def programs(self) -> LayerPrograms:
        """What both programs do."""
        return layer_programs(self.shape)


def refuse_compiled_layers(spec: ModelSpec, setup: TrainingSetup) -> None:
    """Raise for layers whose programs were not read.

    Raises:
        CannotAnswerError: Another stack, family, dtype, kernel or layout.
    """
    config, parallel, profile = setup.config, setup.config.parallel, setup.profile
    if setup.stack.name != "torchtitan" or spec.architecture != "llama":
        raise CannotAnswerError(
            f"compile: layers is not modelled for {spec.architecture} under stack {setup.stack.name}; what is: llama under torchtitan; "
            "with compile: none the answer is that of the same step without a compiler"
        )
    kernels, (heads, fed) = ", ".join(KERNELS), _parts(spec)
    narrow = config.compute_dtype == "bf16" and (is_sharded(parallel) or not setup.autocast)
    own = [name for name in FUSED_KERNELS if getattr(profile, name) != getattr(setup.stack.kernels, name)]
    refused = {
        "adapters": config.adapter is not None,
        "anything but products in bf16, with weights in bf16 or in shards": not narrow,
        "matrices that GPUs share, or pipelines": parallel.tensor * parallel.pipeline * parallel.context > 1,
        "checkpointing of some layers only": config.checkpointed_layers != CheckpointedLayers(),
        "gradients that are released layer by layer": config.gradients.lifetime != "step",
        "gradients in a dtype of their own": config.gradients.dtype is not None,
        "weights in several dtypes": len({*setup.format_names.values()}) > 1,
        "dropout": bool(config.dropout),
        "projections with biases": heads.qkv_bias or heads.output_bias or fed.bias,
        "evaluation": config.evaluation,
        f"kernels.attention: {profile.attention} (modelled: {kernels})": profile.attention not in KERNELS,
        f"kernels.loss: {profile.loss} (modelled: {', '.join(LOSSES)})": profile.loss not in LOSSES,
        f"another choice of what the compiler fuses ({', '.join(f'kernels.{name}' for name in own)})": bool(own),
    }
    shape = layer_shape(spec, setup)
    tokens = config.micro_batch_size * config.sequence_length
    sizes = (shape.hidden, shape.inner, shape.query, shape.key, shape.head_dim, tokens)
    refused[f"padding of widths or tokens that are no multiples of {ALIGNED}"] = any(size % ALIGNED for size in sizes)
    for what in (what for what, result in refused.items() if result):
        raise CannotAnswerError(
            f"compile: layers: not modelled with {what}; memplan trace --stack torchtitan --set compile=layers runs torchtitan's own "
            "compiled layers, and with compile: none the answer is that of the same step without a compiler"
        )


def layer_shape(spec: ModelSpec, setup: TrainingSetup) -> LayerShape:
    """Return what the programs of a model's layers depend on, which are all alike."""
    heads, fed = _parts(spec)
    return LayerShape(
        spec.hidden_size,
        fed.intermediate_size,
        heads.query_size,
        heads.key_value_size,
        heads.num_heads,
        heads.num_key_value_heads,
        heads.head_dim,
        setup.stack.models.fused_qkv == "copies",
        setup.stack.rotary_tables.gathered,
        setup.profile.attention,
        setup.checkpointing,
    )


def _parts(spec: ModelSpec) -> tuple[Attention, Mlp]:
    """Return both parts of a layer."""
    heads, fed = spec.runs[0].layer.attention, spec.runs[0].layer.feed_forward
    assert isinstance(heads, Attention)
    assert isinstance(fed, Mlp)
    return heads, fed


def layer_orders(spec: ModelSpec, setup: TrainingSetup, batch: int, length: int) -> Orders:
    """Return how the programs of a model's layers run.

    Args:
        batch: Sequences of a micro-batch.
        length: Tokens of each.
    """
    return _orders(layer_shape(spec, setup), batch, length)


@lru_cache(maxsize=4096)
def _orders(shape: LayerShape, batch: int, length: int) -> Orders:
    programs = layer_programs(shape)
    units = {Quantity.ONE: 1, Quantity.POSITIONS: length}
    sizes = {name: size * units.get(unit, batch * length) for name, (unit, size) in programs.sizes.items()}
    keys = dtypes(sizes)
    return schedule(programs.forward, sizes, keys), schedule(programs.backward, sizes, keys)


@lru_cache(maxsize=256)
def _played(layer: CompiledLayer, mode: Mode) -> Played:
    programs = layer.programs
    forward = _moments(programs, programs.forward, layer.orders[0], {"x": Part.ACTIVATIONS}, mode)
    saved = sum((single_form(Part.ACTIVATIONS, *programs.sizes[name]) for name in programs.saved), ZERO)
    given = {"dy": Part.TEMPORARIES, **dict.fromkeys(programs.saved, Part.ACTIVATIONS)}
    backward = _moments(programs, programs.backward, layer.orders[1], given, mode)
    return Played(dominant(forward), saved, ZERO, dominant(backward))


def _moments(
    programs: LayerPrograms, program: Program, order: Schedule, given: dict[str, Part], mode: Mode
) -> list[Instant]:
    """Return what is alive while each kernel of a program runs.

    Args:
        given: What is there before, and as what it counts.
    """
    runs_forward, kernels = program is programs.forward, program.kernels
    views = {kernel.makes[0]: kernel.reads[0] if kernel.reads else "" for kernel in kernels if kernel.view}
    last = {name: number for number in order.order for own in kernels[number].reads for name in _whole(own, views)}
    stays = {name for own in program.stays for name in _whole(own, views)}
    forms = {name: _form(programs, program, name, mode) for name in programs.sizes}
    forms |= dict.fromkeys(views, ZERO)
    alive = {name: single_form(part, *programs.sizes[name]) for name, part in given.items()}
    taken, waits = dict(order.taken), {name for _, name in order.taken}
    live: Form = sum(alive.values(), ZERO)
    moments = [] if runs_forward else [Instant("layer", "start", live)]
    for number in order.order:
        kernel = kernels[number]
        over = [kernel.over] if kernel.over and last[kernel.over] == number else []
        for made in kernel.makes:
            live += forms[made]
            alive[made] = forms[made]
        for name in [*over, *(taken[made] for made in kernel.makes if made in taken)]:
            live -= alive.pop(name)
        inside = sum((forms[own] for own in kernel.inside), ZERO)
        moments.append(Instant("forward" if runs_forward else "layer", kernel.name, live + inside))
        read = {name for own in kernel.reads for name in _whole(own, views)}
        done = {name for name in read if last[name] == number} | {name for name in kernel.makes if name not in last}
        for name in done & alive.keys():
            if name not in stays | waits and not (runs_forward and name == "x"):
                live -= alive.pop(name)
    return moments


def _whole(name: str, views: Mapping[str, str]) -> Iterator[str]:
    """Yield a tensor, and what it is a view of."""
    while name:
        yield name
        name = views.get(name, "")


def _form(programs: LayerPrograms, program: Program, name: str, mode: Mode) -> Form:
    """Return a tensor's bytes as what a program makes them: of the step's gradients, to stay for backward, or neither."""
    gradient = name.startswith("d_") and mode == "first"
    stays = program is programs.forward and name in ("f", *programs.saved)
    part = Part.GRADIENTS if gradient else Part.ACTIVATIONS if stays else Part.TEMPORARIES
    return single_form(part, *programs.sizes[name])
