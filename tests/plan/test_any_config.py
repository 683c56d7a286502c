"""Any combination of settings, for any family, is planned or refused with a reason; nothing else happens."""

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from memplan.catalog.kernel_profiles import Kernels
from memplan.catalog.training_config import Adapter, Gradients, TrainingConfig
from memplan.errors import CannotAnswerError, MemplanError
from memplan.library.lookup import catalog_model
from memplan.model.inventory import ROLES
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.plan.suggested.suggestions import with_suggestions
from memplan.report.plans.explain_answer import explain_document
from memplan.report.plans.plan_answer import plan_document
from memplan.training.resolution.resolve_config import resolve
from tests.jobs import shipped_catalog

CATALOG = shipped_catalog()
MODELS = (
    "gpt2", "qwen2.5-0.5b", "llama-3.2-1b", "gemma-2-2b", "gemma-3-1b", "phi-1.5", "phi-3-mini", "pythia-160m", "falcon-7b",
    "olmo-1b", "olmo-2-7b", "smollm3-3b", "stablelm-2-1.6b", "qwen3-0.6b", "qwen3-30b-a3b", "qwen1.5-moe-a2.7b",
    "mixtral-8x7b-v0.1", "deepseek-v2-lite", "deepseek-v3", "gpt-oss-20b",
)  # fmt: skip

roles = st.sampled_from([*ROLES, "default"])
adapters = st.builds(
    Adapter,
    kind=st.sampled_from(["lora", "dora"]),
    rank=st.sampled_from([1, 8, 64]),
    dtype=st.sampled_from(["bf16", "fp32"]),
)
configs = st.builds(
    TrainingConfig,
    description=st.just("drawn"),
    weights=st.dictionaries(roles, st.sampled_from(list(CATALOG.formats)), max_size=3),
    master_weights=st.sampled_from(["none", "bf16", "fp32"]),
    compute_dtype=st.sampled_from(["fp32", "bf16", "fp16"]),
    gradients=st.builds(
        Gradients,
        dtype=st.none() | st.sampled_from(list(CATALOG.gradients)),
        lifetime=st.sampled_from(["step", "layer"]),
    ),
    optimizer=st.dictionaries(roles, st.sampled_from(list(CATALOG.optimizers)), max_size=2),
    micro_batch_size=st.integers(1, 4),
    sequence_length=st.integers(1, 4096),
    gradient_accumulation_steps=st.sampled_from([1, 1, 2]),
    activation_checkpointing=st.sampled_from(["none", "selective", "full"]),
    stack=st.sampled_from(["bundled", "bundled", *CATALOG.stacks]),
    kernels=st.builds(
        Kernels,
        attention=st.sampled_from([None, "flash", "cudnn", "efficient", "math"]),
        norm=st.sampled_from([None, "fused", "composite"]),
        rotary=st.sampled_from([None, "fused", "composite"]),
        activation=st.sampled_from([None, "fused", "composite"]),
        optimizer=st.sampled_from([None, "foreach", "fused", "for-loop"]),
        newton_schulz=st.sampled_from([None, "min", "fast", "torch"]),
        muon_batch_bytes=st.sampled_from([None, 0, 2**24, 2**30]),
        loss=st.sampled_from([None, "bf16", "fp32", "chunked"]),
        loss_chunks=st.sampled_from([None, 1, 3, 64]),
    ),
    adapter=st.none() | st.none() | adapters,
    dropout=st.sampled_from([None, 0.0, 0.1]),
    clip_gradients=st.booleans(),
    zero_gradients=st.sampled_from(["free", "fill"]),
    loss_scaling=st.booleans(),
    weight_average=st.sampled_from(["none", "fp32", "bf16"]),
    evaluation=st.booleans(),
    save_checkpoint=st.booleans(),
    reserve=st.sampled_from(["0 MiB", "1 GiB", "900 GiB"]),
)


@pytest.mark.thorough
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(MODELS), configs, st.sampled_from(list(CATALOG.gpus)))
def test_any_config_is_planned_explained_and_advised_on_or_refused(name, config, gpu):
    try:
        setup = resolve(config, CATALOG, "drawn")
        found = CompiledPlan(catalog_model(name, CATALOG), setup).evaluate(Device(CATALOG.gpus[gpu], gpu))
    except MemplanError:
        assume(False)
    parts = found.components
    assert all(part.bytes > 0 for part in parts)
    assert sum(part.bytes for part in parts) == found.device_bytes
    assert sum(part.bytes for part in parts[:-3]) <= found.requested_bytes
    assert found.requested_bytes <= found.allocated_bytes <= found.reserved_bytes <= found.device_bytes
    assert found.device_bytes <= found.upper_bytes
    assert found.persistent_bytes <= found.requested_bytes
    found = with_suggestions(found, CATALOG)
    assert all(s.saves_bytes > 0 and s.device_bytes + s.saves_bytes == found.device_bytes for s in found.suggestions)
    assert plan_document(found, "", "", True).blocks
    assert explain_document(found, "", "").blocks


@pytest.mark.parametrize("role", ["hidden_matrix", "embedding", "head"])
def test_codes_that_operators_of_torch_decode_are_refused_in_every_role(setup_of, role):
    """An embedding in them, which the trace does not decode so, was 28 % too much of a job."""
    setup = setup_of(adapter=Adapter(rank=8), weights={"default": "bf16", role: "nf4-torchao"})
    with pytest.raises(CannotAnswerError, match=f"weights.{role}: nf4-torchao is decoded by operators of torch"):
        _ = CompiledPlan(catalog_model("gpt2-xl", CATALOG), setup).forms


@pytest.mark.parametrize("role", ["embedding", "head"])
def test_a_float_narrower_than_what_multiplies_it_is_refused_where_nothing_casts_it(role):
    config = TrainingConfig(description="drawn", compute_dtype="fp32", weights={"default": "fp32", role: "bf16"})
    with pytest.raises(MemplanError, match=f"bf16 is narrower than compute_dtype .* give {role} fp32"):
        resolve(config, CATALOG, "job")
    assert resolve(TrainingConfig(description="drawn", weights={"default": "fp32", role: "bf16"}), CATALOG, "job")


@pytest.mark.parametrize("role", ["embedding", "head"])
def test_fp16_beside_products_in_bf16_is_refused_where_nothing_casts_it(role):
    config = TrainingConfig(description="drawn", weights={"default": "bf16", role: "fp16"})
    with pytest.raises(MemplanError, match=rf"fp16 is not compute_dtype .* give {role} bf16"):
        resolve(config, CATALOG, "job")
