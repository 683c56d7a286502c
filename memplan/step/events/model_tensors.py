"""The tensors of a model one by one, in the order in which they are made, and what is made beside them."""

import re
from collections.abc import Container, Sequence

from memplan.catalog.built_models import StackModels
from memplan.catalog.kernel_profiles import CodesLoading
from memplan.step.events.event_stream import EventStream
from memplan.step.kernels.family_code import family_code, tables_apart
from memplan.step.states.muon_scratch import table_sizes
from memplan.step.states.parallel_shards import ADAPTER, Named, in_layers, is_sharded
from memplan.step.step_inputs import StepInputs
from memplan.step.tapes.linear_forms import Form, Part, Quantity
from memplan.step.tensors.tensor_states import TensorStates
from memplan.training.resolved import FLOAT_BYTES

_IN_MODULE = {
    "behind": ("weight", "bias"),
    "before": ("lora_A.weight", "lora_B.weight", "weight", "bias"),
    "beside": ("weight", "bias", "lora_magnitude_vector.weight", "lora_A.weight", "lora_B.weight"),
}
"""Where a stack has an adapter's parameters -> parameters of a module in order."""


class ModelTensors:
    """A model's tensors, single and in order.

    Attributes:
        all: Those of the model itself, then those of adapters.
        trained: Those that are trained, likewise.
    """

    __slots__ = ("_inputs", "all", "trained")

    def __init__(self, inputs: StepInputs) -> None:
        self._inputs = inputs
        own = len(inputs.states.tensors)
        adapted = next((i for i, e in enumerate(inputs.states.tensors) if ".lora_" in e.tensor.name), own)
        tensors, models = inputs.states.tensors, inputs.setup.stack.models
        self.all: list[Named] = [*in_layers(tensors[:adapted]), *in_layers(tensors[adapted:])]
        if models.head_first:
            self.all.sort(key=lambda named: not named[0].startswith(f"{inputs.spec.names.head}."))
        if models.module_order or models.adapter_place != "behind":
            self.all = in_modules(self.all, models)
        self.trained = [(name, entry) for name, entry in self.all if entry.trainable]

    def weight_sizes(self, without: Container[str] = ()) -> list[int]:
        """Return the bytes of each weight: floats in the order of the model, then codes, which are buffers, and their scales.

        Where a library has codes as parameters, each is in its place, its scales behind it.

        Args:
            without: Names of weights that lie elsewhere.
        """
        entries = [entry for name, entry in self.all if name not in without]
        if self._apart:
            if self._shards_beside_codes:  # which are there when units are cut, those of layers first
                entries.sort(key=lambda entry: (not entry.quantized, "{}" not in entry.tensor.name))
            return [size for e in entries for size in (self._levels(e) if e.quantized else [e.weight_bytes])]
        floats = [entry.weight_bytes for entry in entries if not entry.quantized]
        return floats + [size for entry in entries if entry.quantized for size in self._levels(entry)]

    def load(self, stream: EventStream, loading: CodesLoading) -> None:
        """Write how weights come to the card that are quantised there, some more being sent while one is, and adapters then.

        Source:
            ``caching_allocator_warmup`` in transformers/modeling_utils.py, ``convert_and_load_state_dict_in_model`` in
            core_model_loading.py (5.24.0), whose ``GLOBAL_WORKERS`` threads sent weights ahead up to 5.3; ``Params4bit._quantize`` in
            bitsandbytes/nn/modules.py; ``prepare_model_for_kbit_training`` in peft/utils/other.py (0.21.2), which casts and clears the
            cache; ``_inner_training_loop`` in transformers/trainer.py, whose ``free_memory`` clears it too.
        """
        own = {name: entry for name, entry in self.all if ADAPTER not in name}
        casts = self._inputs.setup.kbit_floats
        sent = {n: min(e.weight_bytes, 2 * e.tensor.elements) if casts else e.weight_bytes for n, e in own.items()}
        sent |= {name: 2 * entry.tensor.elements for name, entry in own.items() if entry.quantized}
        stream.of("temporaries")
        stream.passing(sum(sent[name] // (4 if entry.quantized else 1) for name, entry in own.items()))
        order = sorted(own, key=_natural)
        there: dict[str, int] = {}
        for place, name in enumerate(order):
            for coming in order[len(there) : place + loading.ahead + 1]:
                stream.of("temporaries" if own[coming].quantized else "weights")
                there[coming] = stream.allocate(sent[coming])
            if own[name].quantized:
                stream.of("weights")
                stream.allocate_all(self._levels(own[name]))
                stream.free(there[name])
        for name, entry in own.items():
            if not entry.quantized and sent[name] != entry.weight_bytes:
                stream.allocate(entry.weight_bytes)
                stream.free(there[name])
        stream.cleared = len(stream.codes) if loading.cleared and casts else 0
        stream.allocate_all(entry.weight_bytes for name, entry in self.all if ADAPTER in name)
        if loading.cleared and not casts:
            stream.cleared = len(stream.codes)

    def sent(self) -> list[tuple[str, int]]:
        """Return dtype and bytes of each tensor that replicas are sent: weights, without what libraries keep beside codes."""
        entries = [entry for _, entry in self.all]
        if not self._apart:  # codes are buffers, which come behind
            entries.sort(key=lambda entry: entry.quantized)
        return [("codes" if e.quantized else e.format_name, self._levels(e)[0]) for e in entries]

    def _levels(self, entry: TensorStates) -> list[int]:
        """Return the bytes of each tensor that codes are stored in: one, or several where a library has them apart."""
        layout = self._inputs.setup.formats[entry.tensor.role]
        if layout.row_bytes:
            rows = layout.row_bytes * entry.tensor.shape[0]
            return [entry.weight_bytes - rows, rows]
        sizes = [size for size in layout.level_sizes(entry.tensor.elements) if size]
        return sizes if self._apart and sum(sizes) == entry.weight_bytes else [entry.weight_bytes]

    @property
    def _shards_beside_codes(self) -> bool:
        """Whether floats are cut into shards on the device, and codes stay as they are: ``fsdp2_prepare_model`` in accelerate/utils/fsdp_utils.py (1.15.0)."""
        setup = self._inputs.setup
        parallel = setup.config.parallel
        by_accelerate = setup.stack.sharded_units == "accelerate" and parallel.engine == "torch"
        return by_accelerate and is_sharded(parallel) and any(entry.quantized for _, entry in self.all)

    @property
    def _apart(self) -> bool:
        """Whether codes are parameters, and their scales tensors of their own."""
        return self._inputs.setup.stack.model_code != "own"

    def buffer_sizes(self, buffers: Form, values: Sequence[int]) -> list[int]:
        """Return the bytes of token ids and targets, of each table by position, and of the rest.

        Args:
            buffers: Bytes of all of them.
        """
        positions = buffers.coefficient(Part.ACTIVATIONS, Quantity.POSITIONS) * values[Quantity.POSITIONS]
        layouts = {e.coded_as.codec: e.coded_as for _, e in self.all if e.coded_as is not None}
        codecs = [size for layout in layouts.values() for size in table_sizes(layout)]
        stack, spec, parallel = self._inputs.setup.stack, self._inputs.spec, self._inputs.setup.config.parallel
        together = parallel.together if parallel.pipeline > 1 else 1
        batch = [part.element_bytes * values[Quantity.TOKENS] for part in stack.batch] * together
        layers = sum(run.count for run in spec.runs) if tables_apart(spec, self._inputs.setup) else 0
        apart = 1 if stack.model_code == "torchtitan" else 2  # ``RoPE`` has cosines and sines in one
        tables = apart * (layers or spec.rotary_tables) or 1  # learned positions have their numbers alone
        own = self._of_modules()
        rest = buffers.total_bytes(values) - sum(batch) - positions - sum(codecs) - sum(own)
        whole = layers if stack.rotary_tables.rows == "model" and layers else 1  # each for all positions, in one tensor
        return [*batch, *[positions // tables] * tables, *codecs, *own, *[rest // whole] * whole]

    def _of_modules(self) -> list[int]:
        """Return the bytes of each mask and each table that layers, or the model, of transformers' keep."""
        stack, spec = self._inputs.setup.stack, self._inputs.spec
        layers = spec.num_hidden_layers
        if stack.model_code != "transformers":
            return []
        masks = layers if spec.architecture in stack.models.triangles else 0
        of_each = layers if family_code(stack, spec.architecture).interleaved == "looked-up" else 1
        return [spec.max_position_embeddings**2] * masks + list(spec.buffers) * of_each

    def replaced_sizes(self, buffers: Form, values: Sequence[int]) -> list[int]:
        """Return the bytes of each table that a model is made with, and that others take the place of."""
        spec, positions = self._inputs.spec, values[Quantity.POSITIONS]
        if not self._inputs.setup.stack.rotary_tables.replaced or positions == spec.max_position_embeddings:
            return []
        whole = buffers.coefficient(Part.ACTIVATIONS, Quantity.POSITIONS) * spec.max_position_embeddings
        return [whole // 2] * 2

    def copy_sizes(self) -> list[int]:
        """Return the bytes of each master weight, and of each averaged one."""
        average = FLOAT_BYTES.get(self._inputs.setup.config.weight_average, 0)
        masters = [entry.master_bytes for _, entry in self.trained]
        return masters + [average * entry.tensor.elements for _, entry in self.trained]


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts names as ``dot_natural_key`` in transformers/core_model_loading.py does."""
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]


def in_modules(tensors: Sequence[Named], models: StackModels) -> list[Named]:
    """Return a model's tensors module by module, those of a layer in the order that a stack says."""
    parts, order = _IN_MODULE[models.adapter_place], {name: place for place, name in enumerate(models.module_order)}
    blocks: dict[str, int] = {}
    modules: dict[str, int] = {}

    def place(name: str) -> tuple[int, int, int, int]:
        part = next((part for part in parts if "lora_" in part and name.endswith(part)), name.rpartition(".")[2])
        module = name.removesuffix(f".{part}")
        numbered = re.match(r".*?\.\d+\.", name)
        block = module if numbered is None else numbered.group()
        rank = order.get(module.rpartition(".")[2], -1)
        of_module = modules.setdefault(module, len(modules))
        return blocks.setdefault(block, len(blocks)), rank, of_module, parts.index(part) if part in parts else 0

    places = {name: place(name) for name, _ in tensors}
    return sorted(tensors, key=lambda named: places[named[0]])
