"""The answer of ``memplan fit`` for one job at a glance: verdict, components, what to change or what room is left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from memplan.plan.model_notes import (
    decoded_weights_note,
    experts_format,
    recurrent_kernels,
    rows_alone,
    runs_text_alone,
)
from memplan.plan.parallel_assumptions import has_whole_codes
from memplan.report.canvas import Canvas
from memplan.report.document import Block
from memplan.report.plans.plan_answer import device_name, learning, ranks_table, sized, total_words
from memplan.training.own_settings import own_settings
from memplan.training.rules.frozen_rules import ALL_LAYERS
from memplan.units import format_bytes

if TYPE_CHECKING:
    from memplan.plan.memory_plan import MemoryPlan, Suggestion

SMALL = 100
"""Components of less than one part in so many share a line."""
OF_THE_STEP = ("gradients", "activations", "logits", "temporaries", "communication")
"""Components that come and go within a step: the largest of them makes the peak."""
MOST_CHANGES = 3
ROOM_WORDS = {"micro_batch_size": "micro-batch", "sequence_length": "sequence"}
CHANGE_WORDS = {
    "activation_checkpointing": "checkpointing {}",
    "adapter.kind": "{} adapters",
    "allocator": "{} segments",
    "checkpointed_layers.every": "every layer checkpointed",
    "checkpointed_layers.first": "every layer checkpointed",
    "compute_dtype": "{} compute",
    "gradients.lifetime": "updates inside backward",
    "kernels.adapters": "{} kernels of adapters",
    "kernels.loss": "{} loss",
    "kernels.optimizer": "{} optimizer",
    "loss_scaling": "a loss scale",
    "micro_batch_size": "micro-batch {}",
    "offload.activations": "activations in host memory",
    "offload.optimizer_states": "states in host memory",
    "offload.weights": "weights in host memory",
    "optimizer": "{}",
    "parallel.engine": "quantised weights sharded too, by {}",
    "parallel.zero_stage": "ZeRO stage {}",
    "sequence_length": "sequence {}",
    "weights.default": "{} weights",
    "weights.hidden_matrix": "{} weights",
    "zero_gradients": "gradients dropped each step",
}
"""A change in words by its key; one that is not here goes with another."""
MORE = "More: -v (every instant and formula); memplan explain, suggest, compare, why"
MORE_GPUS = "More: memplan where (GPUs that hold it), suggest, explain, compare, why; -v"


def plan_screen(plan: MemoryPlan, canvas: Canvas, unit: str, room: Mapping[str, int]) -> tuple[Block, ...]:
    """Return one plan as a screen.

    Args:
        room: For a job that fits: key of the training config -> the largest value that fits by itself.
    """
    unit = unit or "GiB"
    more = MORE if plan.verdict == "fits" else MORE_GPUS
    return (
        (*headline(plan, canvas, unit), *_job(plan, canvas)),
        (*_components(plan, canvas, unit), *_gauge(plan, canvas, unit)),
        *([ranks_table(plan, unit)] if plan.ranks else []),
        tuple(_changes(plan, canvas, unit) if plan.suggestions else _room(plan, canvas, room)),
        tuple(part for line in (_assumed(plan), *_notes(plan, unit), more) for part in canvas.folded(line, 0, 2)),
    )


def headline(plan: MemoryPlan, canvas: Canvas, unit: str) -> list[str]:
    """Return verdict, expected, worst case and usable bytes, GPU and stack: one line where it is wide enough."""
    words = total_words(plan)
    sizes = [format_bytes(size, unit) for size in (plan.needed_bytes, plan.upper_bytes, plan.usable_bytes)]
    first, upper, usable = sizes[0], *(size.rpartition(" ")[0] for size in sizes[1:])
    left = f"{plan.verdict.upper():<5}  {first} {words[0]}, {upper} {words[1]}, {usable} usable"
    where, stack = device_name(plan), plan.setup.stack
    names = dict.fromkeys((stack.label, stack.name))
    return min((canvas.between(left, f"{where}, {name}", indent=7) for name in names), key=len)


def _job(plan: MemoryPlan, canvas: Canvas) -> list[str]:
    config, steps = plan.setup.config, plan.setup.config.gradient_accumulation_steps
    parts = (
        sized(plan.model, ""),
        plan.setup.label,
        _stage(plan),
        f"micro-batch {plan.micro_batch_size}{_pairs(plan)}",
        f"sequence {plan.sequence_length}",
        f"accumulation {steps}" if steps > 1 else "",
        f"checkpointing {plan.setup.config.checkpointing_words}",
    )
    known = config.status in ("proven", "works")
    return [*canvas.joined(parts, indent=7), *([] if known else canvas.folded(f"learning: {learning(plan.setup)}", 7))]


def _stage(plan: MemoryPlan) -> str:
    """Return what a step learns from where it is not plain rows, with a teacher, or a model of values, that is on the card too."""
    stage, teacher = plan.setup.config.method.stage, plan.setup.teacher
    if teacher is not None:
        return f"{stage} from {teacher.model.spec.name}"
    if plan.setup.value_model is not None:
        return f"{stage} beside {plan.setup.value_model.model.spec.name}"
    return stage if stage != "sft" else ""


def _pairs(plan: MemoryPlan) -> str:
    if plan.setup.rows_per_sample == 1 or plan.setup.config.method.embedding is not None:
        return ""
    return " pair" if plan.micro_batch_size == 1 else " pairs"


def _components(plan: MemoryPlan, canvas: Canvas, unit: str) -> tuple[str, ...]:
    """Return a bar for every component, those that hardly count in one."""
    shown = [line for line in plan.components if line.bytes * SMALL >= plan.device_bytes]
    small = [line for line in plan.components if line not in shown]
    fullest = max((line for line in shown if line.name in OF_THE_STEP), key=lambda line: line.bytes, default=None)
    peak = f"<- peak: {plan.peak.name}"
    rows = [
        (_label(plan, line.name), format_bytes(line.bytes, unit), line.bytes, peak if line is fullest else "")
        for line in shown
    ]
    if small:
        size, names = sum(line.bytes for line in small), ", ".join(line.name for line in small)
        room = len(names) < canvas.width - 40
        rows.append(("the rest", format_bytes(size, unit), size, names if room else f"{len(small)} more"))
    return canvas.bars(rows)


def _label(plan: MemoryPlan, name: str) -> str:
    experts = experts_format(plan)
    apart = f", experts {experts}" if experts else ""
    return f"weights ({plan.setup.format_names['hidden_matrix']}{apart})" if name == "weights" else name


def _gauge(plan: MemoryPlan, canvas: Canvas, unit: str) -> list[str]:
    percent = (200 * plan.needed_bytes + plan.usable_bytes) // max(1, 2 * plan.usable_bytes)
    share = f"{percent} % of {format_bytes(plan.usable_bytes, unit)} usable"
    columns = max(10, min(48, canvas.width - len(share) - 6))
    host = (
        f"  besides: {format_bytes(plan.host_bytes, unit)} of pinned host memory" if plan.setup.offloads_states else ""
    )
    if plan.host.tensors:
        pinned, node = format_bytes(plan.host.pinned_bytes, unit), format_bytes(plan.node_host_bytes, unit)
        shared = (
            f" per {plan.node_name}, {pinned} pinned by each" if plan.node_ranks > 1 else f", {pinned} of it pinned"
        )
        host = f"  besides: {node} of host memory{shared}"
    if host and (limit := plan.device.host_memory_bytes) is not None:
        host += (
            f"; it has {format_bytes(limit, unit)}" if plan.host.tensors else f"; there are {format_bytes(limit, unit)}"
        )
    lines = [f"  {canvas.gauge(plan.needed_bytes, plan.upper_bytes, plan.usable_bytes, columns)} {share}", host]
    return [line for line in lines if line]


def _changes(plan: MemoryPlan, canvas: Canvas, unit: str) -> Iterator[str]:
    """Yield changes in the words of the job's stack, each with what the device holds then, with memory to spare: the
    cheapest of those that make the job fit; where none does, those that leave the least.
    """
    fitting = [change for change in plan.suggestions if change.flips_verdict]
    shown = fitting or sorted(plan.suggestions, key=lambda change: change.needed_bytes)
    yield from canvas.folded("What to change:" if fitting else "Nothing that was tried makes it fit; what saves most:")
    if plan.needed_bytes != plan.device_bytes:
        as_it_is = f"(with memory to spare, where the job as it is takes {format_bytes(plan.device_bytes, unit)})"
        yield from canvas.folded(as_it_is, 2)
    yield from canvas.columns(
        [
            (
                f"{number}  {format_bytes(change.needed_bytes, unit):>9}  {change.verdict_in(plan.usable_bytes)}",
                _words(change),
                _settings(change),
            )
            for number, change in enumerate(shown[:MOST_CHANGES], 1)
        ]
    )


def _words(change: Suggestion) -> str:
    """Return a change in words."""
    pairs = (setting.split("=", 1) for setting in change.change.split(" "))
    return ", ".join(dict.fromkeys(CHANGE_WORDS[key].format(value) for key, value in pairs if key in CHANGE_WORDS))


def _settings(change: Suggestion) -> list[str]:
    """Return a change as it is written: lines of the stack's own configuration, else options of ours."""
    own = dict.fromkeys(setting.text for setting in change.own if setting.own_key is not None)
    return list(own) or [f"--set {setting}" for setting in change.change.split(" ")]


def _room(plan: MemoryPlan, canvas: Canvas, room: Mapping[str, int]) -> list[str]:
    """Return how far a job that fits can be taken, one size at a time; nothing where that cannot be sought."""
    if not room:
        return []
    now = {"micro_batch_size": plan.micro_batch_size, "sequence_length": plan.sequence_length}
    rows = [
        (ROOM_WORDS[key], f"{value:,}", [own_words(plan, key, value)])
        for key, value in room.items()
        if value > now[key]
    ]
    if not rows:
        return canvas.folded("No larger batch and no longer sequence is likely to fit.")
    one_of = "one of" if len(rows) > 1 else "this"
    return [
        *canvas.folded(f"Room left, estimated (memplan max finds the exact edge), for {one_of}:"),
        *canvas.columns(rows),
    ]


def own_words(plan: MemoryPlan, key: str, value: int) -> str:
    """Return a size in the words of the job's stack, which has others for a pipeline's micro-batches."""
    own = "" if plan.ranks else own_settings(plan.setup.stack, [(key, value)])[0].text
    return own or f"--set {key}={value}"


def card_notes(plan: MemoryPlan) -> list[str]:
    """Return what the GPU does in another way, but for the attention that torch takes anywhere."""
    usual = f"attention {plan.setup.profile.attention}: what torch"
    return [f"Note: {note}" for note in plan.setup.card_notes if not note.startswith(usual)]


def _notes(plan: MemoryPlan, unit: str) -> Iterator[str]:
    """Yield what a reader has to know of the answer besides."""
    if plan.padding_bytes:
        yield f"Worst case: {format_bytes(plan.padding_bytes, unit)} of it for padded rows (if none: --set padded_rows=false)"
    if words := rows_alone(plan):
        yield f"Note: {words}"
    if words := decoded_weights_note(plan):
        yield f"Note: {words}"
    yield from card_notes(plan)


def _seen(plan: MemoryPlan) -> str:
    """Return how many images each row holds, where there are any."""
    count = plan.setup.config.images.per_row
    return f" with {count} {'image' if count == 1 else 'images'} each" if count else ""


def _assumed(plan: MemoryPlan) -> str:
    """Return in a line what the answer takes for granted."""
    profile, reserve = plan.setup.profile, plan.setup.reserve_bytes
    experts = experts_format(plan)
    installed = {
        "torch": " (fla, where it is installed, needs less)",
        "torch-scan": " (mamba, where it is installed, needs less)",
    }
    kernels = recurrent_kernels(plan)
    scanned = "state space layers" if plan.model.spec.state_space is not None else "linear attention"
    parts = (
        f"{plan.attention} attention",
        f"{scanned} by {profile.linear_attention}{installed.get(kernels, '')}" if kernels else "",
        f"{profile.loss} loss",
        f"{'padded rows' if plan.pads_rows else 'full sequences'}{_seen(plan)}",
        "the text model alone" if runs_text_alone(plan) else "",
        f"experts in {experts}, as bitsandbytes quantises linear layers alone" if experts else "",
        "quantised weights whole on each GPU (parallel.engine=fsdp1 shards them)" if has_whole_codes(plan) else "",
        f"{format_bytes(reserve)} kept free" if reserve else "an idle GPU",
        "allocator by share" if plan.reserve_by_share else "",
        *(note for note in plan.model.notes if ALL_LAYERS in note),
    )
    return f"Assumes: {', '.join(filter(None, parts))}"
