"""Plans as stacked bars, one for each config or GPU, against what the GPU has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from memplan.plan.components import COMPONENTS
from memplan.report.figures import Axes, Figure, new_figure
from memplan.units import GIB, format_bytes

if TYPE_CHECKING:
    from memplan.plan.memory_plan import MemoryPlan


def plan_bars(plans: Sequence[MemoryPlan]) -> Figure:
    """Return a picture of plans: the components at each one's peak, its interval, and what its GPU has."""
    figure, (axes,) = new_figure(width=9.0, height=1.7 + 0.42 * len(plans))
    several = len({plan.device.counted_name for plan in plans}) > 1
    shown = [name for name in COMPONENTS if any(line.name == name for plan in plans for line in plan.components)]
    left = [0.0] * len(plans)
    for name in shown:
        sizes = [sum(line.bytes for line in plan.components if line.name == name) / GIB for plan in plans]
        axes.barh(
            range(len(plans)),
            sizes,
            left=left,
            height=0.62,
            color=COLOURS[name],
            label=name,
            edgecolor="white",
            linewidth=0.4,
        )
        left = [before + size for before, size in zip(left, sizes, strict=True)]
    for row, plan in enumerate(plans):
        _ends(axes, row, plan, last=row == len(plans) - 1)
    axes.set_yticks(range(len(plans)), _names(plans, several=several))
    axes.set(ylim=(len(plans) - 0.4, -0.6), xlabel="GiB on each device", title=_title(plans, several=several))
    axes.margins(x=0.16)
    axes.grid(visible=False, axis="y")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", fontsize=8)
    return figure


def _names(plans: Sequence[MemoryPlan], *, several: bool) -> list[str]:
    """Return what each bar is called: its config, its GPU where there are several, and what else tells it apart."""
    names = [f"{plan.setup.name}{f' on {plan.device.name}' if several else ''}" for plan in plans]
    return [
        f"{name}, checkpointing {plan.setup.config.checkpointing_words}" if names.count(name) > 1 else name
        for name, plan in zip(names, plans, strict=True)
    ]


def _title(plans: Sequence[MemoryPlan], *, several: bool) -> str:
    first = plans[0]
    where = "" if several else f" on {first.device.counted_name}: {format_bytes(first.usable_bytes)} usable"
    return f"{first.model.spec.name}{where}"


def _ends(axes: Axes, row: int, plan: MemoryPlan, *, last: bool) -> None:
    """Draw the end of a bar's interval, its verdict, and the capacity as a line across the bar."""
    expected, upper, usable = (size / GIB for size in (plan.device_bytes, plan.upper_bytes, plan.usable_bytes))
    axes.plot([expected, upper], [row, row], color="#222222", linewidth=1.2)
    axes.plot([usable] * 2, [row - 0.5, row + 0.5], color="#b00020", linewidth=2, label="usable" if last else None)
    text = f" {plan.verdict.upper()} {format_bytes(plan.device_bytes)}"
    axes.text(max(expected, upper, usable), row, text, va="center", ha="left", fontsize=8)


COLOURS: Mapping[str, str] = {
    "weights": "#0072b2",
    "master_weights": "#56b4e9",
    "gradients": "#e69f00",
    "optimizer_states": "#009e73",
    "buffers": "#999999",
    "activations": "#f0e442",
    "logits": "#cc79a7",
    "temporaries": "#d55e00",
    "communication": "#000000",
    "library_workspaces": "#666666",
    "allocator_reserve": "#c8c8c8",
    "device_context": "#7f8fa6",
    "nccl_buffers": "#4b5d73",
    "generation_engine": "#332288",
}
"""Colours that remain distinct without red-green vision (Okabe and Ito, https://jfly.uni-koeln.de/color/); greys lie outside
what tensors make up."""
