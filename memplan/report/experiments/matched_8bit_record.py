"""The record of ``memplan lab matched-8bit`` as tables and a picture."""

from typing import Any

from memplan.report.document import Table
from memplan.report.experiments import interval_text
from memplan.report.experiments.gaps import gap_cell
from memplan.report.figures import LINES, PALETTE, Axes, Figure, new_figure
from memplan.units import format_bytes

COMPONENTS = {"weights": "weights", "gradients": "gradients", "optimizer_states": "optimizer states"}
HATCHES = ("", "////", "xx")
MIB = 1 << 20
LOSSES = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)
"""Losses to name on the logarithmic axis."""


def blocks(record: dict[str, Any]) -> tuple[Table | str, ...]:
    """Return what training gave, bytes beside the plan, and what formats save in each shape."""
    trained = [row for row in record["rows"] if row["steps"]]
    tables = [_runs(trained), _bytes(trained)] if trained else []
    return (*tables, _savings(record["rows"]))


def _runs(rows: list[dict[str, Any]]) -> Table:
    cells = [
        (
            row["momentum"],
            interval_text(row["loss"], ".4f"),
            gap_cell(row),
            interval_text(row["tokens_per_second"], ",.0f"),
            interval_text(row["throughput_percent"], "+.1f"),
        )
        for row in rows
    ]
    title = f"{rows[0]['shape']}, {rows[0]['parameters']:,} parameters, {rows[0]['steps']} steps"
    return Table(("momentum", ">loss", ">gap to fp32, %", ">tokens/s", ">throughput, %"), tuple(cells), title)


def _bytes(rows: list[dict[str, Any]]) -> Table:
    cells = [
        (
            row["momentum"],
            name,
            f"{planned:,}",
            f"{measured:,}",
            f"{measured - planned:+,}" if measured - planned else "0",
        )
        for row in rows
        for component, name in COMPONENTS.items()
        for planned, measured in [(row["predicted_bytes"][component], row["measured_bytes"][component])]
    ]
    return Table(("momentum", "component", ">planned bytes", ">measured bytes", ">difference"), tuple(cells), "Bytes")


def _savings(rows: list[dict[str, Any]]) -> Table:
    cells = [
        (
            row["shape"],
            row["momentum"],
            format_bytes(row["momentum_bytes"], "MiB"),
            format_bytes(row["predicted_bytes"]["optimizer_states"], "MiB"),
            *(f"{row['saving_percent'][key]:.1f}" for key in row["saving_percent"]),
        )
        for row in rows
    ]
    headers = ("shape", "momentum", ">momentum bytes", ">all states", ">of momentum, %", ">of states, %", ">of all, %")
    return Table(headers, tuple(cells), "Planned, and saved against fp32")


def figure(record: dict[str, Any]) -> Figure:
    """Return loss curves and bytes of the shape that was trained; of a plan alone, the bytes."""
    trained = [row for row in record["rows"] if row["steps"]]
    shown = trained or [row for row in record["rows"] if row["shape"] == record["rows"][0]["shape"]]
    drawn, panels = new_figure(2 if trained else 1, width=10.4 if trained else 6.4, height=4.4)
    if trained:
        _curves(panels[0], trained)
    _bars(panels[-1], shown)
    size = f"{shown[0]['parameters'] / 1e6:.3g}M parameters"
    said = "the same model, steps, data and seeds" if trained else "planned"
    drawn.suptitle(f"Momentum in fp32, 8 and 4 bits, {size}: {said}", fontsize=12)
    return drawn


def _curves(axes: Axes, rows: list[dict[str, Any]]) -> None:
    for place, row in enumerate(rows):
        if not row["curve"]:
            continue
        steps, mean, low, high = zip(*row["curve"], strict=True)
        color = PALETTE[place]
        axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
        gap = f": {gap_cell(row)} %" if row["gap_percent"] and place else ""
        axes.plot(steps, mean, color=color, linestyle=LINES[place], label=f"{row['momentum']}{gap}")
    gaps = [row["gap_percent"] for row in rows]
    close = all(gap and max(abs(gap["low"]), abs(gap["high"])) < 1 for gap in gaps)
    axes.set_title("Training loss: the curves lie on each other" if close else "Training loss")
    axes.set_yscale("log")
    bottom, top = axes.get_ylim()
    ticks = [tick for tick in LOSSES if bottom <= tick <= top]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("Step")
    axes.set_ylabel("Nats per byte (band: seeds)")
    axes.legend(loc="upper right", title="Momentum: validation loss against fp32")


def _bars(axes: Axes, rows: list[dict[str, Any]]) -> None:
    names = [row["momentum"] for row in rows]
    start = [0.0] * len(rows)
    for place, (component, label) in enumerate(COMPONENTS.items()):
        sizes = [(row["measured_bytes"] or row["predicted_bytes"])[component] / MIB for row in rows]
        color = ("#bbbbbb", PALETTE[5], PALETTE[6])[place]
        axes.barh(
            names, sizes, 0.6, start, color=color, edgecolor="black", linewidth=0.6, hatch=HATCHES[place], label=label
        )
        start = [before + size for before, size in zip(start, sizes, strict=True)]
    for place, (total, row) in enumerate(zip(start, rows, strict=True)):
        saved = row["saving_percent"]["weights_gradients_and_states"]
        axes.text(
            total * 1.01,
            place,
            f"{total:.3g}" if not saved else f"{total:.3g}\n-{saved:.1f} %",
            va="center",
            fontsize=9,
        )
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, max(start) * 1.14)
    axes.grid(visible=False, axis="y")
    axes.set_title("Weights, gradients and states")
    axes.set_xlabel("MiB")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3)
