"""A decoder layer that torch compiles by itself: what its programs have alive, kernel by kernel, in the order that the compiler chose."""

from collections.abc import Iterator
from functools import lru_cache
from math import gcd

from memplan.catalog.training_config import CheckpointedLayers
from memplan.documents.frozen_values import dataclass
from memplan.errors import CannotAnswerError
from memplan.model.spec import Attention, Mlp, ModelSpec
from memplan.step.compiled_layers.layer_programs import LayerPrograms, dtypes, layer_programs
from memplan.step.compiled_layers.layer_sizes import LayerShape
from memplan.step.playing.section import SavedTensor
from memplan.step.states.parallel_shards import is_sharded
from memplan.step.tapes.kernel_order import Program, Schedule, orders, schedule
from memplan.step.tapes.linear_forms import ZERO, Coefficients, Form, Part, Quantity, single_form
from memplan.step.tapes.moments import Instant, Played, dominant
from memplan.step.tapes.reduction_workspaces import Sums, row_sums
from memplan.step.tapes.taped_operations import Mode
from memplan.training.resolved import TrainingSetup

Orders = tuple[Schedule, Schedule]
"""Of a layer's forward, and of its backward."""

KERNELS = ("flash", "cudnn", "flex")
LOSSES = ("fp32", "chunked-backward")
"""Those of torchtitan's own, which it compiles."""
FUSED_KERNELS = ("norm", "rotary", "activation")
"""Operations of which a compiler makes kernels of its own."""
INSTEAD = (
    "memplan trace --stack torchtitan --set compile=layers runs torchtitan's own compiled layers, and with compile: none the "
    "answer is that of the same step without a compiler"
)
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
    if setup.stack.name != "torchtitan" or spec.architecture not in ("llama", "qwen3"):
        raise CannotAnswerError(
            f"compile: layers is not modelled for {spec.architecture} under stack {setup.stack.name}; what is: llama and qwen3 under torchtitan; "
            "with compile: none the answer is that of the same step without a compiler"
        )
    kernels, (heads, fed) = ", ".join(KERNELS), _parts(spec)
    narrow = config.compute_dtype == "bf16" and (is_sharded(parallel) or not setup.autocast)
    normed = heads.query_key_norm is not None
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
        "as many heads of keys as of queries, each normed": normed and heads.num_heads == heads.num_key_value_heads,
        "norms of heads in torchtitan before 0.3.0": normed and setup.stack.models.fused_qkv != "copies",
        "projections with biases": heads.qkv_bias or heads.output_bias or fed.bias,
        "evaluation": config.evaluation,
        f"kernels.attention: {profile.attention} (modelled: {kernels})": profile.attention not in KERNELS,
        f"kernels.loss: {profile.loss} (modelled: {', '.join(LOSSES)})": profile.loss not in LOSSES,
        f"another choice of what the compiler fuses ({', '.join(f'kernels.{name}' for name in own)})": bool(own),
    }
    sizes = (spec.hidden_size, fed.intermediate_size, heads.query_size, heads.key_value_size, heads.head_dim)
    refused[f"padding of widths that are no multiples of {ALIGNED}"] = any(size % ALIGNED for size in sizes)
    for what in (what for what, result in refused.items() if result):
        raise CannotAnswerError(f"compile: layers: not modelled with {what}; {INSTEAD}")


def multiple_of_tokens(setup: TrainingSetup, factor: int) -> int:
    """Return what a batch has to be a multiple of beside sequences of ``factor`` tokens, or a sequence beside a batch of so many."""
    return ALIGNED // gcd(ALIGNED, factor) if setup.config.compile == "layers" else 1


def refuse_padded_tokens(setup: TrainingSetup, batch: int, length: int) -> None:
    """Raise for a micro-batch whose products a compiler may pad.

    Raises:
        CannotAnswerError: Its tokens are no multiple of what rows are aligned to.
    """
    if length % multiple_of_tokens(setup, batch):
        tokens = f"{batch} x {length} tokens, no multiple of {ALIGNED}"
        raise CannotAnswerError(f"compile: layers: not modelled with padding of {tokens}; {INSTEAD}")


def layer_shape(spec: ModelSpec, setup: TrainingSetup, sums: tuple[Sums, ...], *, alone: bool) -> LayerShape:
    """Return what the programs of a model's layers depend on, which are all alike.

    Args:
        sums: How rows are summed (:func:`layer_sums`).
        alone: Whether a micro-batch is one sequence.
    """
    heads, fed = _parts(spec)
    return LayerShape(
        hidden=spec.hidden_size,
        inner=fed.intermediate_size,
        query=heads.query_size,
        key=heads.key_value_size,
        heads=heads.num_heads,
        groups=heads.num_key_value_heads,
        head_dim=heads.head_dim,
        fused=setup.stack.models.fused_qkv == "copies",
        gathers=setup.stack.rotary_tables.gathered,
        alone=alone and setup.stack.rotary_tables.gathered,
        attention=setup.profile.attention,
        checkpointing=setup.checkpointing,
        sums=sums[0],
        head_sums=sums[1:],
    )


def layer_sums(spec: ModelSpec, tokens: int) -> tuple[Sums, ...]:
    """Return how rows are summed: the stream's, and those of all heads' queries and of their keys, where these are normed."""
    heads, _ = _parts(spec)
    normed = (heads.num_heads, heads.num_key_value_heads) if heads.query_key_norm is not None else ()
    return (row_sums(spec.hidden_size, tokens), *(row_sums(heads.head_dim, tokens * number) for number in normed))


def layer_orders(spec: ModelSpec, setup: TrainingSetup, sums: tuple[Sums, ...], batch: int, length: int) -> Orders:
    """Return how the programs of a model's layers run.

    Args:
        batch: Sequences of a micro-batch.
        length: Tokens of each.
    """
    return _orders(layer_shape(spec, setup, sums, alone=batch == 1), batch, length)


def _parts(spec: ModelSpec) -> tuple[Attention, Mlp]:
    """Return both parts of a layer."""
    heads, fed = spec.runs[0].layer.attention, spec.runs[0].layer.feed_forward
    assert isinstance(heads, Attention)
    assert isinstance(fed, Mlp)
    return heads, fed


@lru_cache(maxsize=4096)
def _orders(shape: LayerShape, batch: int, length: int) -> Orders:
    keys = dtypes(layer_programs(shape).sizes)
    forward, backward = (schedule(program, sizes, keys) for program, sizes in _counted(shape, batch, length))
    return forward, backward


def _counted(shape: LayerShape, batch: int, length: int) -> Iterator[tuple[Program, dict[str, int]]]:
    """Yield both programs with the bytes of their tensors, as Inductor counts them."""
    programs = layer_programs(shape)
    units = {Quantity.ONE: 1, Quantity.POSITIONS: length}
    for program, counted in ((programs.forward, {}), (programs.backward, programs.counted)):
        tensors = (programs.sizes | counted).items()
        yield program, {name: size * units.get(unit, batch * length) for name, (unit, size) in tensors}


def order_doubt_bytes(layer: CompiledLayer, batch: int, length: int, values: Coefficients) -> int:
    """Return what a layer has alive more in the worst of the orders that the compiler tries, if it used no memory again.

    Which order is the best hangs on estimates that are less than a per cent apart, and these on how reductions are split,
    which is another on cards with fewer multiprocessors.

    Args:
        batch: Sequences of a micro-batch.
        length: Tokens of each.
        values: Those of the quantities that forms are in.
    """
    programs, most = layer.programs, 0
    for (program, sizes), own in zip(_counted(layer.shape, batch, length), layer.orders, strict=True):
        tried = (Schedule(order) for order in orders(program, sizes))
        least, *peaks = (
            max(
                moment.form.total_bytes(values)
                for moment in _moments(programs, program, one, _given(programs, program), "first")
            )
            for one in (own, *tried)
        )
        most = max(most, max(peaks) - least)
    return most


def _given(programs: LayerPrograms, program: Program) -> dict[str, Part]:
    """Return what is there before a program, and as what it counts."""
    if program is programs.forward:
        return {"x": Part.ACTIVATIONS}
    return {"dy": Part.TEMPORARIES, **dict.fromkeys(programs.saved, Part.ACTIVATIONS)}


@lru_cache(maxsize=256)
def _played(layer: CompiledLayer, mode: Mode) -> Played:
    programs = layer.programs
    saved = sum((single_form(Part.ACTIVATIONS, *programs.sizes[name]) for name in programs.saved), ZERO)
    forward, backward = (
        _moments(programs, program, order, _given(programs, program), mode)
        for program, order in zip((programs.forward, programs.backward), layer.orders, strict=True)
    )
    return Played(dominant(forward), saved, ZERO, dominant(backward))


def _moments(
    programs: LayerPrograms, program: Program, order: Schedule, given: dict[str, Part], mode: Mode
) -> list[Instant]:
    """Return what is alive while each kernel of a program runs.

    Args:
        given: What is there before, and as what it counts.
    """
    runs_forward, kernels = program is programs.forward, program.kernels
    last, ends = program.last_reads(order.order), _ends(program, order)
    forms = {name: _form(programs, program, name, mode) for name in programs.sizes}
    alive = {name: single_form(part, *programs.sizes[name]) for name, part in given.items()}
    taken, live = dict(order.taken), sum(alive.values(), ZERO)
    moments = [] if runs_forward else [Instant("layer", "start", live)]
    for step, number in enumerate(order.order):
        kernel = kernels[number]
        made = kernel.makes if kernel.kind == "called" else program.formed(kernel, alive)
        over = [kernel.over] if last.get(kernel.over) == step and kernel.over in alive else []
        for name in made:
            live += forms[name]
            alive[name] = forms[name]
        for name in [*over, *(taken[name] for name in made if name in taken)]:
            live -= alive.pop(name)
        inside = sum((forms[own] for own in kernel.inside), ZERO)
        moments.append(Instant("forward" if runs_forward else "layer", kernel.name, live + inside))
        for name in ends.get(step, ()):
            if name in alive and not (runs_forward and name == "x"):
                live -= alive.pop(name)
    return moments


def _ends(program: Program, order: Schedule) -> dict[int, list[str]]:
    """Return what has its memory until a step of an order, and no longer."""
    last, stays = program.last_reads(order.order), program.outliving() | {name for _, name in order.taken}
    for step, number in enumerate(order.order):
        kernel = program.kernels[number]
        if kernel.kind == "called":  # all that it returns is there until the last part of it is taken
            last |= {name: max(last.get(name, step), last.get(kernel.results, step)) for name in kernel.makes}
        elif kernel.kind == "written":
            last |= {name: step for name in kernel.makes if name not in last}
    result: dict[int, list[str]] = {}
    for name, step in last.items():
        if name not in stays:
            result.setdefault(step, []).append(name)
    return result


def _form(programs: LayerPrograms, program: Program, name: str, mode: Mode) -> Form:
    """Return a tensor's bytes as what a program makes them: of the step's gradients, to stay for backward, or neither."""
    gradient = name.startswith("d_") and mode == "first"
    stays = program is programs.forward and name in ("f", "f1", *programs.saved)
    part = Part.GRADIENTS if gradient else Part.ACTIVATIONS if stays else Part.TEMPORARIES
    return single_form(part, *programs.sizes[name])
