"""The one way to divide: shards cover the whole, waste little, and every term of a plan goes through them."""

from dataclasses import fields, replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memplan
from memplan.catalog.config_keys.parallel_keys import FlatShards, Parallel
from memplan.catalog.kernel_profiles import Kernels
from memplan.catalog.training_config import Adapter, Gradients, Offload, TrainingConfig
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.library.answers.planned_job import plan_by_share
from memplan.model.inventory import ParameterTensor
from memplan.plan.bytes_per_parameter import bytes_per_parameter
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.plan.reserve.simulation import simulated
from memplan.plan.sizes.largest_model import fewest_devices
from memplan.report.plans.plan_answer import plan_data
from memplan.step.collectives.gathered_units import sent_bytes, unit
from memplan.step.states.model_states import model_states
from memplan.step.states.parallel_shards import gathered_setup, rank_tensors, shard
from memplan.step.tapes.linear_forms import Part
from memplan.training.resolution.resolve_config import resolve
from memplan.units import MIB, format_bytes

MIXED = {"weights": {"default": "fp32"}, "optimizer": {"default": "adamw-fp32"}}
SHAPE = st.tuples(st.integers(1, 5000), st.integers(1, 64))


ALONE = Parallel()


def setup_of(catalog, parallel=ALONE, **keys):
    return resolve(TrainingConfig("", parallel=parallel, **keys), catalog, "test")


@pytest.fixture
def device(catalog):
    return Device(catalog.gpus["h100-sxm-80gb"], "h100-sxm-80gb")


# ------------------------------------------------------------------ the division
@given(SHAPE, st.integers(1, 512))
def test_shards_cover_the_whole_and_waste_less_than_a_slice_each(shape, ranks):
    tensor = ParameterTensor("w", shape, "hidden_matrix")
    part = shard(tensor, ranks)
    assert 0 <= ranks * part.elements - tensor.elements < ranks * shape[1]
    assert part.shape[1:] == tensor.shape[1:]


@pytest.fixture(scope="module")
def unsharded(catalog):
    return setup_of(catalog), setup_of(catalog, Parallel(8, 0))


@given(SHAPE)
def test_one_rank_holds_everything(unsharded, shape):
    tensor = ParameterTensor("w", shape, "hidden_matrix")
    assert shard(tensor, 1) == tensor
    assert all(rank_tensors((tensor,), setup) == (tensor,) for setup in unsharded)


def test_a_shard_is_what_torch_gives_the_first_rank():
    torch = pytest.importorskip("torch")
    for rows in (1, 7, 8, 10, 63, 64, 65):
        for ranks in (2, 3, 8, 64):
            first = torch.chunk(torch.empty(rows, 2), ranks)[0]
            assert shard(ParameterTensor("w", (rows, 2), "norm"), ranks).shape == tuple(first.shape)


def test_a_unit_is_gathered_in_the_compute_dtype_and_reduced_in_the_weights_own(catalog):
    tensors = (ParameterTensor("a", (10, 4), "hidden_matrix"), ParameterTensor("b", (6,), "norm"))
    layer = unit(tensors, setup_of(catalog, Parallel(4, 3), **MIXED))
    elements = 3 * 4 + 2
    assert layer.gathered_bytes == 4 * elements * 2
    assert layer.reduced_bytes == 4 * elements * 4
    assert layer.kept_bytes == elements * 4
    assert layer.cast_bytes == elements * 2
    assert layer.last_bytes == 10 * 4 * 2
    assert unit(tensors, setup_of(catalog, Parallel(4, 3))).cast_bytes == 0


@pytest.mark.parametrize("apart", [False, True])
def test_each_matrix_of_an_adapter_is_a_flat_tensor_alone(catalog, apart):
    flat = FlatShards(use_orig_params=apart)
    setup = setup_of(catalog, Parallel(7, 3, engine="fsdp1", flat=flat), stack="trl", adapter=Adapter(rank=4))
    matrices = [ParameterTensor(f"m.layers.{{}}.q.lora_{part}.weight", (4, 100), "hidden_matrix", 3) for part in "AB"]
    assert [tensor.shape for tensor in rank_tensors(matrices, setup)] == [
        (58,),
        (58,),
    ]  # of 400 elements, seven equal pieces
    layer = [ParameterTensor("m.layers.{}.q.weight", (100, 100), "hidden_matrix", 3), *matrices]
    frozen = unit(layer, setup)
    assert (frozen.gathered_bytes, frozen.kept_bytes, frozen.reduced_bytes) == (2 * 7 * 1429, 0, 0)
    assert unit(matrices[:1], setup).kept_bytes == 4 * 58


def test_axolotl_shards_codes_in_bf16_and_leaves_their_scales_whole(catalog):
    config = TrainingConfig("", **NF4_OF_AXOLOTL, parallel=Parallel(8, 3), compute_dtype="bf16")
    setup = resolve(config, catalog, "test")
    matrix = ParameterTensor("layers.{}.q_proj.weight", (30, 128), "hidden_matrix", 2)
    (own,) = rank_tensors((matrix,), setup)
    assert (own.shape, setup.format_names[own.role]) == ((120,), "bf16")  # 30 * 128 codes, four in an element, by 8
    assert unit((matrix,), setup).gathered_bytes == 8 * 120 * 2
    scales = model_states(setup, (matrix,), ()).weight_bytes - 2 * 120 * 2
    assert scales == 2 * (30 * 128 // 64 * 4 + 16 * 4)


@pytest.mark.parametrize("engine", ["torch", "fsdp1"])
def test_weights_that_are_trained_over_fsdp_are_in_fp32_and_their_states_too(catalog, engine):
    setup = setup_of(catalog, Parallel(7, 3, engine=engine), stack="trl", weights={"default": "bf16"})
    assert set(setup.format_names.values()) == {"fp32"}
    assert set(setup.optimizer_names.values()) == {"adamw-fp32"}


def test_gathered_weights_need_no_autocast(catalog):
    setup = setup_of(catalog, Parallel(4, 3), **MIXED)
    whole = gathered_setup(setup)
    assert setup.autocast
    assert not whole.autocast
    assert set(whole.format_names.values()) == {"bf16"}
    assert {layout.block_bytes for layout in whole.formats.values()} == {2}


# ------------------------------------------------------------------ plans
@pytest.mark.parametrize("keys", [{}, MIXED], ids=["bf16", "mixed"])
def test_states_shrink_with_the_number_of_gpus(catalog, model, device, keys):
    llama = model("llama-3.1-8b")
    plans = [
        CompiledPlan(llama, setup_of(catalog, Parallel(n, 3) if n > 1 else Parallel(), **keys)) for n in (1, 2, 8, 64)
    ]
    for one, more, ratio in zip(plans, plans[1:], (2, 4, 8), strict=False):
        for name in ("weight_bytes", "gradient_bytes", "state_bytes"):
            assert getattr(one.states, name) == ratio * getattr(more.states, name)
        assert one.evaluate(device).requested_bytes > more.evaluate(device).requested_bytes


def test_replicas_hold_what_one_gpu_holds_and_buckets_for_the_gradients(catalog, model, device):
    llama = model("llama-3.2-1b")
    one, two = (
        CompiledPlan(llama, setup_of(catalog, parallel)).evaluate(device) for parallel in (Parallel(), Parallel(2))
    )
    assert two.requested_bytes == one.requested_bytes + one.states.gradient_bytes
    assert two.communication_bytes == one.states.gradient_bytes
    assert two.persistent_bytes == one.persistent_bytes
    assert one.communication_bytes == 0


@pytest.mark.parametrize(
    ("stack", "config", "kind", "told", "copies"),
    [
        ("transformers", "lora", "full", None, True),
        ("transformers", "lora", "full", False, False),
        ("transformers", "bf16-adamw", "full", None, False),
        ("transformers", "bf16-adamw", "full", True, True),
        ("axolotl", "lora", "none", None, False),
        ("axolotl", "lora", "none", True, True),
        ("llama-factory", "lora", "none", None, False),
        ("llama-factory", "bf16-adamw", "none", None, True),
        ("llama-factory", "bf16-adamw", "full", None, False),
    ],
)
def test_replicas_that_look_for_unused_parameters_copy_what_the_model_returns(stack, config, kind, told, copies):
    def forward_bytes(told):
        keys = {"activation_checkpointing": kind, "parallel.data": 2, "parallel.unused_parameters": told}
        if kind == "full":  # torch ends with an error beside the other kind
            keys["reentrant_checkpointing"] = False
        plan = plan_by_share("llama-3.2-1b", gpu="h100", stack=stack, config=config, set=keys)
        return plan.to_dict()["instants"][0]["requested_bytes"]

    assert forward_bytes(True) > forward_bytes(False)
    assert forward_bytes(told) == forward_bytes(copies)


def test_replicas_of_other_loops_are_told_nothing():
    keys = {"parallel.data": 2, "parallel.unused_parameters": True}
    with pytest.raises(CannotAnswerError, match="transformers' Trainer's are"):
        plan_by_share("llama-3.2-1b", gpu="h100", stack="bundled", config="bf16-adamw", set=keys)


def test_nccl_is_a_line_of_its_own_with_an_interval(catalog, model, device):
    plan = CompiledPlan(model("llama-3.2-1b"), setup_of(catalog, Parallel(8, 3))).evaluate(device)
    line = next(row for row in plan.components if row.name == "nccl_buffers")
    assert (line.bytes, line.kind) == (688 * MIB, "stated")
    assert "github.com/NVIDIA/nccl" in line.source
    assert sum(row.bytes for row in plan.components) == plan.device_bytes
    alone = CompiledPlan(model("llama-3.2-1b"), setup_of(catalog)).evaluate(device)
    assert plan.allowances.upper_context_bytes - alone.allowances.upper_context_bytes == (
        1_600_000_000 + plan.allowances.stream_bytes
    )
    assert plan.allowances.stream_bytes > 0
    assert alone.allowances.nccl_bytes == alone.allowances.stream_bytes == 0


def test_shards_of_gradients_that_are_not_there_at_the_peak_are_said_to_stay_reserved(catalog, model, device):
    long = {"micro_batch_size": 8, "sequence_length": 8192}
    plan = CompiledPlan(model("llama-3.2-1b"), setup_of(catalog, Parallel(8, 3), **long)).evaluate(device)
    shards = sum(plan.forms.unit_gradients)
    assert plan.peak.name == "loss backward"
    assert shards > plan.parts[Part.GRADIENTS] == 0
    assert any(f"may then show up to {format_bytes(shards)} more" in line for line in plan.assumptions)
    short = CompiledPlan(model("llama-3.2-1b"), setup_of(catalog, Parallel(2, 3))).evaluate(device, 1, 1)
    assert short.parts[Part.GRADIENTS] > 0
    assert not any("shards of gradients come from" in line for line in short.assumptions)


def test_a_share_as_reserve_stands_beside_what_the_streams_of_gathers_and_reductions_hold(catalog, model, device):
    long = {"micro_batch_size": 8, "sequence_length": 8192, "compile": "layers", "stack": "torchtitan@0.2.2"}
    plan = CompiledPlan(model("llama-3.1-8b"), setup_of(catalog, Parallel(8, 3), **long)).evaluate(device)
    told = simulated(plan)
    shards = sum(plan.forms.unit_gradients)
    assert plan.parts[Part.GRADIENTS] == 0
    assert told.reserve_by_share
    assert told.reserved_bytes - plan.reserved_bytes == shards + plan.allowances.stream_bytes
    assert told.upper_bytes - plan.upper_bytes == shards
    assert sum(row.bytes for row in told.components) == told.device_bytes
    assert any("which is counted beside the share" in line for line in told.assumptions)


def test_the_json_says_how_many_gpus_and_gives_the_bytes_of_one(catalog, model, device):
    plan = CompiledPlan(model("llama-3.1-8b"), setup_of(catalog, Parallel(8, 3))).evaluate(device)
    data = plan_data(plan, "")
    assert data["gpu"] == {
        "name": "h100-sxm-80gb",
        "count": 8,
        "memory_bytes": device.memory_bytes,
        "usable_bytes": device.usable_bytes(0),
    }
    assert data["bytes_per_parameter"]["total"] == 8 / 8
    assert data["training"]["parallel"]["data"] == 8
    assert any("fully_shard" in line for line in data["assumptions"])


def test_bytes_per_parameter_are_shared_out_too(catalog):
    whole, eighth = (bytes_per_parameter(setup_of(catalog, p)) for p in (Parallel(), Parallel(8, 3)))
    for field in fields(whole):
        assert getattr(whole, field.name) == 8 * getattr(eighth, field.name)
    assert eighth.total == Fraction(1)


def test_what_is_sent_follows_the_ring(catalog, model):
    inventory = model("llama-3.1-8b").inventory
    layers = sum(t.elements * t.count for t in inventory if "{}" in t.name)
    rest = sum(t.elements for t in inventory if "{}" not in t.name)
    sharded = sent_bytes(setup_of(catalog, Parallel(8, 3)), inventory, 0)
    assert sharded == 2 * (3 * layers + 2 * rest) * 7 // 8
    assert sent_bytes(setup_of(catalog, Parallel(8)), inventory, 1600) == 2 * 1600 * 7 // 8
    assert sent_bytes(setup_of(catalog), inventory, 1600) == 0


# ------------------------------------------------------------------ what is refused
SHARDED = Parallel(8, 3)
NF4_OF_AXOLOTL = {"stack": "axolotl", "weights": {"hidden_matrix": "nf4", "default": "bf16"}, "adapter": Adapter()}
CODED = {"weights": {"hidden_matrix": "q4-0", "default": "bf16"}, "optimizer": {"default": "adamw-int8"}}


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"parallel": Parallel(8, 1)}, "parallel.zero_stage: 1 is not supported; planned is data parallelism"),
        ({"parallel": Parallel(8, 2)}, "parallel.zero_stage: 2 is not supported"),
        ({"parallel": Parallel(1, 3)}, "one GPU, which has nothing to share"),
        ({"parallel": Parallel(tensor=2)}, "parallel.tensor: 2 is not supported: tensor parallelism is not modelled"),
        ({"parallel": Parallel(sequence=True)}, "parallel.sequence: true is not supported"),
        ({"parallel": Parallel(pipeline=2)}, "pipeline parallelism"),
        ({"parallel": Parallel(context=2)}, "context parallelism"),
        ({"parallel": Parallel(expert=2)}, "expert parallelism"),
        ({"stack": "torchtitan", "parallel": Parallel(8)}, "wraps replicas in fully_shard too"),
        ({"parallel": Parallel(8), **CODED}, "q4-0 cannot be trained on several GPUs"),
        ({"parallel": Parallel(8), "gradients": Gradients(lifetime="layer")}, "use step"),
        ({"parallel": Parallel(8), "gradients": Gradients(dtype="fp8-e4m3")}, "reduce gradients in bf16"),
        (
            {"parallel": Parallel(8), "adapter": Adapter(dtype="bf16"), "gradients": Gradients(dtype="fp32")},
            "reduce gradients in bf16",
        ),
        ({"parallel": SHARDED, **CODED, "adapter": Adapter()}, "shards of codes"),
        ({**NF4_OF_AXOLOTL, "parallel": SHARDED, "compute_dtype": "fp32"}, "fp32 beside codes that are stored in bf16"),
        ({"parallel": Parallel(8), "offload": Offload(optimizer_states="cpu")}, "replicas that keep anything in host"),
        (
            {
                "parallel": SHARDED,
                "optimizer": {"hidden_matrix": "muon-bf16"},
                "kernels": Kernels(newton_schulz="torch"),
            },
            "muon-bf16 is not supported with zero_stage 3",
        ),
        ({"parallel": SHARDED, "optimizer": {"default": "adamw-8bit-bnb"}}, "use adamw-bf16"),
        ({"parallel": SHARDED, "adapter": Adapter()}, "adapters are not supported with zero_stage 3"),
        ({"parallel": SHARDED, "master_weights": "fp32"}, "use weights: fp32 and compute_dtype: bf16"),
        ({"parallel": SHARDED, "weights": {"default": "bf16", "norm": "fp32"}}, "one format for all weights"),
        ({"parallel": SHARDED, "kernels": Kernels(loss="chunked")}, "the head would be a unit of its own"),
        ({"parallel": replace(SHARDED, engine="deepspeed")}, "not under bundled"),
        ({"parallel": replace(SHARDED, engine="fsdp1")}, "as accelerate runs it, not under bundled"),
        (
            {"stack": "trl", "parallel": replace(SHARDED, engine="fsdp1"), "adapter": Adapter(kind="dora")},
            "modelled for lora under transformers' Trainer, TRL and axolotl",
        ),
        (
            {
                "stack": "axolotl",
                "parallel": replace(SHARDED, engine="fsdp1"),
                "adapter": Adapter(),
                "compute_dtype": "bf16",
            },
            "use kernels.adapters: composite",
        ),
        (
            {
                "stack": "axolotl",
                "parallel": replace(SHARDED, engine="fsdp1"),
                "adapter": Adapter(),
                "weights": {"default": "fp32"},
                "compute_dtype": "bf16",
                "kernels": Kernels(adapters="composite", loss="fused-linear"),
            },
            "gathers fp32 weights in bf16",
        ),
        ({"parallel": SHARDED, "weight_average": "bf16"}, "an average of shards"),
        ({"parallel": SHARDED, "weights": {"default": "fp16"}, "compute_dtype": "fp16"}, "fp16 is not supported"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_not_modelled_is_refused_with_what_can_be_done(catalog, keys, reason):
    with pytest.raises(CannotAnswerError) as caught:
        resolve(TrainingConfig("", **keys), catalog, "test")
    assert reason in str(caught.value)


@pytest.mark.parametrize("parallel", [Parallel(0), Parallel(2, 4), Parallel(tensor=-1)])
def test_impossible_degrees_are_bad_input(catalog, parallel):
    with pytest.raises(InvalidFileError, match=r"parallel\."):
        setup_of(catalog, parallel)


def test_how_many_gpus_is_no_question_for_a_config_that_says_so(catalog, model, device):
    plan = CompiledPlan(model("llama-3.2-1b"), setup_of(catalog, SHARDED))
    with pytest.raises(CannotAnswerError, match="leave it out"):
        fewest_devices(plan, device)
    with pytest.raises(CannotAnswerError, match="pooled"):
        plan.evaluate(replace(device, count=2))


def test_keys_of_an_engine_that_is_not_used_are_refused(refused, write):
    path = write("eight.yaml", "description: x\nparallel: {data: 8, deepspeed: {reduce_bucket_size: 5}}\n")
    given = ("fit", "llama-3.2-1b", "--gpu", "h100", "--config", path)
    assert "counts with parallel.engine: deepspeed alone" in refused(*given)


@pytest.mark.parametrize("gpus", [1, 4])
def test_codes_of_linear_layers_that_no_library_replaces_are_refused_over_shards_as_on_one_gpu(gpus):
    with pytest.raises(CannotAnswerError, match="linear layers of a class of its own"):
        plan_by_share("falcon-7b", gpu="h100", gpus=gpus, config="qlora", stack="transformers")


@pytest.mark.parametrize("engine", ["torch", "fsdp1"])
def test_shards_without_mixed_precision_are_stored_gathered_and_reduced_in_16_bits(engine):
    keys = {"autocast": False, "parallel.engine": engine}
    job = {"gpu": "h100", "gpus": 4, "config": "bf16-adamw", "stack": "transformers"}
    mixed = plan_by_share("llama-3.2-1b", set=keys | {"autocast": None}, **job)
    plain = plan_by_share("llama-3.2-1b", set=keys, **job)
    assert 2 * int(plain.components["weights"]) == int(mixed.components["weights"])


@pytest.mark.parametrize("stack", ["bundled", "transformers"])
def test_logits_in_stretches_of_a_row_are_litgpts_alone(stack):
    keys = {"kernels.loss": "fp32-stretches"}
    with pytest.raises(CannotAnswerError, match=r"kernels\.loss: fp32-stretches is not modelled for"):
        plan_by_share("llama-3.2-1b", gpu="h100", config="bf16-adamw", stack=stack, set=keys)


def test_gradients_in_the_dtype_that_they_have_anyway_are_the_same_on_several_gpus():
    job = {"gpu": "h100", "config": "mixed-adamw", "gpus": 2, "sequence_length": 64}
    plain, said = (memplan.plan("llama-3.2-1b", set=keys, **job) for keys in ({}, {"gradients.dtype": "fp32"}))
    assert said.memory.instants == plain.memory.instants
