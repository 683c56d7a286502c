"""Programs of compiled layers, node by node as Inductor's scheduler has them.

Each row of ``compiled_graphs.json`` was taken where ``reorder_for_peak_memory`` (torch 2.13.0) is given the nodes of one layer of
torchtitan's Llama or Qwen3: digests of what each node allocates, frees and reads, in order, and of the order that it chose.
"""

import json
import random
from hashlib import sha256
from pathlib import Path

import pytest

from memplan.step.compiled_layers.layer_programs import layer_programs
from memplan.step.compiled_layers.layer_sizes import LayerShape
from memplan.step.tapes.kernel_order import _Graph, orders
from memplan.step.tapes.linear_forms import Quantity
from memplan.step.tapes.reduction_workspaces import Sums, column_sum_bytes, row_sums

ROWS = json.loads((Path(__file__).parent / "compiled_graphs.json").read_text(encoding="utf-8"))


def digest(lines):
    return sha256("\n".join(lines).encode()).hexdigest()[:16]


def shape_of(row):
    hidden, inner, heads, groups, width = row["model"]
    own = row["stack"] == "torchtitan"
    widths = (hidden, inner, heads * width, groups * width, heads, groups, width)
    tokens = row["batch"] * row["length"]
    normed = (heads, groups) if row.get("family") == "qwen3" else ()
    sums, of_heads = row_sums(hidden, tokens), tuple(row_sums(width, tokens * number) for number in normed)
    alone = own and row["batch"] == 1
    return LayerShape(*widths, own, own, alone, row["attention"], row["checkpointing"], sums, of_heads)


def nodes_of(program, sizes):
    graph = _Graph(program, sizes)
    place = {name: number for number, kernel in enumerate(program.kernels) for name in kernel.leaves}
    for number, kernel in enumerate(program.kernels):
        frees = sorted(sizes.get(name, 0) for name in (*kernel.leaves, *kernel.fused))
        given = [name for name in dict.fromkeys(kernel.reads) if name in place or name in program.given]
        reads = (str((place[name], sizes.get(name, 0))) if name in place else f"in{sizes[name]}" for name in given)
        yield f"{graph.takes[number]} {frees} {sorted(reads)}"


@pytest.mark.parametrize(
    "row",
    ROWS,
    ids=lambda row: (
        f"{row['stack']}-{row.get('family', 'llama')}-{row['checkpointing']}-{row['attention']}-{row['batch']}x{row['length']}"
    ),
)
def test_nodes_and_their_order_are_inductors(row):
    programs, tokens = layer_programs(shape_of(row)), row["batch"] * row["length"]
    units = {Quantity.ONE: 1, Quantity.POSITIONS: row["length"]}
    for key, program, counted in (("forward", programs.forward, {}), ("backward", programs.backward, programs.counted)):
        own = {name: size * units.get(unit, tokens) for name, (unit, size) in (programs.sizes | counted).items()}
        graph = _Graph(program, own)
        chosen = min(orders(program, own), key=graph.estimate)
        assert [digest(nodes_of(program, own)), digest([str(list(chosen))])] == row[key]


@pytest.mark.parametrize(
    ("columns", "rows", "sums"),
    [
        (320, 64, Sums("whole")),
        (320, 512, Sums("split", 4)),
        (512, 4096, Sums("split", 32)),
        (480, 192, Sums("split", 2)),
        (16384, 4096, Sums("whole")),
        (512, 12288, Sums("mixed", 96, 768)),
        (64, 98304, Sums("mixed", 768, 1536)),
        (64, 196608, Sums("mixed", 1024, 1536)),
    ],
)
def test_sums_over_rows_are_split_as_inductor_splits_them(columns, rows, sums):
    assert row_sums(columns, rows) == sums


def test_sums_of_drawn_shapes_are_what_they_were():
    """What holds them to torch are the shapes above and the memory history of an H200; this notices what happens between those."""
    rng = random.Random(7)
    shapes = [
        (rng.choice((rng.randrange(1, 200), 64 * rng.randrange(1, 300))), rng.randrange(1, 40_000)) for _ in range(4000)
    ]
    shapes += [(columns, rows) for columns in (1, 2, 3, 64, 128, 768, 16384, 16448) for rows in range(1, 1100)]
    shapes += [(columns, 2**power) for columns in (1, 6, 64, 4096, 16384) for power in range(20)]
    shapes.append((270_336, 1024))  # blocks enough for all multiprocessors, each of the fewest values that are shared
    found = [(column_sum_bytes(rows, columns), row_sums(columns, rows)) for columns, rows in shapes]
    assert digest(map(str, found)) == "89856e1e9c8178c6"
