"""Rows with images on tensors without memory: how many patches an image has is known, and what hangs on values has its shape.

On a card a model reads the grid of each image from the device, and forms positions and masks of it. Here the grid lies on
the CPU with the values that the job has, and what is made of the values of ids and masks is made of its size alone.

Source:
    transformers/models/qwen2_5_vl/modeling_qwen2_5_vl.py and transformers/vision_utils.py (5.23.0).
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from memplan.model.spec import ModelSpec
from memplan.model.tower import TowerShape
from memplan.step.kernels.image_rows import image_sizes
from memplan.trace.pretended_cuda.chosen_rows import ChosenRows
from memplan.training.resolved import TrainingSetup

POSITION_TAPS = 4
"""Learned positions that one of a patch lies between."""

POSITION_AXES = 3
"""Of a token: its time, its row, its column."""


def shape_of(spec: ModelSpec, setup: TrainingSetup) -> TowerShape | None:
    """Return the tower that images of a job pass through; None where its rows hold text alone."""
    tower = spec.tower
    return tower.shape if tower is not None and setup.config.images.per_row else None


def image_grids(spec: ModelSpec, setup: TrainingSetup, rows: int) -> Tensor:
    """Return frames, rows and columns of patches of each image of so many rows, shape (images, 3)."""
    images, shape = setup.config.images, shape_of(spec, setup)
    assert shape is not None
    sides = shape.sides(images.height, images.width, images.pixels)
    grid = [1, *(side // shape.patch_size for side in sides)]
    return torch.tensor([grid] * images.per_row * rows)


def image_columns(spec: ModelSpec, setup: TrainingSetup, rows: int) -> dict[str, Tensor]:
    """Return what a processor makes of images beside ids: pixels, shape (patches, values), grids, and which tokens they are."""
    images, shape = setup.config.images, shape_of(spec, setup)
    if shape is None:
        return {}
    grid = shape.grid(*shape.sides(images.height, images.width, images.pixels))
    patches = grid.patches * images.per_row * rows
    kinds = (rows, setup.config.sequence_length)
    with torch.device("cpu"):
        if shape.image_size is not None:
            pixels = shape.image_size
            channels = shape.patch_values // shape.patch_size**2
            return {
                "pixel_values": torch.zeros((images.per_row * rows, channels, pixels, pixels)),
                "token_type_ids": torch.zeros(kinds, dtype=torch.long),
            }
        return {
            "pixel_values": torch.zeros((patches, shape.patch_values)),
            "image_grid_thw": image_grids(spec, setup, rows),
            "mm_token_type_ids": torch.zeros(kinds, dtype=torch.long),
        }


class _ImageTokens(ChosenRows):  # type: ignore[no-untyped-call]
    """Chooses images' tokens of what layers return; other masks are none of its own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
        if any(isinstance(mask, Tensor) and mask.untyped_storage()._cdata in self.counted for mask in masks):
            return super().__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def _position_ids(grid_thw: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty((int(grid_thw.prod(-1).sum()), 2), dtype=torch.long, device="meta")


OWN_ADDITION = "_own_deepstack_process"
"""What a library's own function is called that adds images to early layers' results, where it has one."""


def _taps(grid_thw: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    patches = int(grid_thw.prod(-1).sum())
    places = torch.empty((patches, POSITION_TAPS), dtype=torch.long, device="meta")
    return places, torch.empty((patches, POSITION_TAPS), device="meta")


def _rope_index(_: Any, input_ids: Tensor, *__: Any, **___: Any) -> tuple[Tensor, Tensor]:
    rows, tokens = input_ids.shape
    positions = torch.zeros((POSITION_AXES, rows, tokens), dtype=torch.long, device=input_ids.device)
    return positions, torch.zeros((rows, 1), dtype=torch.long, device=input_ids.device)


@contextmanager
def known_images(spec: ModelSpec, setup: TrainingSetup) -> Iterator[None]:
    """Let a model of transformers run rows with images on tensors without memory."""
    shape = shape_of(spec, setup)
    if shape is None or shape.image_size is not None:
        yield  # sizes alone
        return
    config = setup.config
    family = spec.architecture
    code: Any = import_module(f"transformers.models.{family}.modeling_{family}")
    model = next(own for name, own in vars(code).items() if name.endswith("VLModel"))
    towers = ("VisionTransformerPretrainedModel", "VLVisionModel")
    tower = next(own for name, own in vars(code).items() if name.endswith(towers))
    features, seen = model.get_image_features, tower.forward

    def with_grids(self: Any, pixel_values: Tensor, image_grid_thw: Any = None, **options: Any) -> Any:
        del image_grid_thw
        return features(self, pixel_values, image_grids(spec, setup, config.micro_batch_size), **options)

    def seen_by_tower(self: Any, hidden_states: Tensor, grid_thw: Any = None, **options: Any) -> Any:
        del grid_thw
        return seen(self, hidden_states, image_grids(spec, setup, config.micro_batch_size), **options)

    text = next(own for name, own in vars(code).items() if name.endswith("VLTextModel"))
    add: Any = getattr(text, "_deepstack_process", None)
    counted, tokens = dict[int, int](), image_sizes(spec, setup)[1]

    def handed(self: Any, hidden_states: Tensor, mask: Tensor, embeds: Tensor) -> Tensor:
        counted.clear()  # a mask is there as long as layers run, and their backward
        counted[mask.untyped_storage()._cdata] = tokens * config.micro_batch_size
        own: Any = self.__dict__.get(OWN_ADDITION) or partial(add, self)
        out: Tensor = own(hidden_states, mask, embeds)
        return out

    with (
        mock.patch.object(model, "get_image_features", with_grids),
        mock.patch.object(tower, "forward", seen_by_tower),
        mock.patch.object(model, "get_rope_index", _rope_index),
        mock.patch.object(code, "get_vision_position_ids", _position_ids),
        mock.patch.object(code, "get_vision_interpolation_indices_and_weights", _taps, create=True),
        mock.patch.object(ChosenRows, "counted", counted),
        mock.patch.object(text, "_deepstack_process", handed, create=True),
        _ImageTokens() if shape.deep_blocks else nullcontext(),
    ):
        yield
