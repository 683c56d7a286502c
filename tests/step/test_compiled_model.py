"""What torch's compiler leaves of a step: the formula by laws, by a recorded trace, and (slow) by the compiler's own programs."""

from dataclasses import replace

import pytest

from memplan.catalog.catalog import Catalog, data_directory
from memplan.errors import CannotAnswerError
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from tests.survey.drawn_jobs import Job, resolved

# Requested peaks of the compiler's own programs (torch 2.13.0): vocabulary, length, layers, width, heads, batch, micro-steps,
# dropout, dtype, capability -> bytes.
PEAKS = {
    (50304, 1024, 2, 768, 12, 4, 1, 0.0, "bf16", "9.0"): 2_234_192_032,
    (50304, 512, 3, 256, 4, 2, 2, 0.0, "fp16", "8.0"): 615_608_568,
    (65, 256, 3, 384, 6, 64, 1, 0.2, "bf16", "8.0"): 886_002_160,
    (512, 256, 1, 256, 2, 2, 1, 0.0, "bf16", "8.0"): 21_308_512,
    (50257, 256, 3, 1024, 8, 2, 2, 0.0, "fp16", "8.0"): 2_148_459_688,
}


def keys(vocabulary, length, layers, width, heads, batch, steps, dropout, dtype, _, compiled="model", **more):
    model = {"model_type": "gpt2", "vocab_size": vocabulary, "n_positions": length, "n_embd": width, "n_head": heads}
    training = {
        "description": "compiled",
        "stack": "nanogpt",
        "weights": {"default": "fp32"},
        "compute_dtype": dtype,
        "sequence_length": length,
        "micro_batch_size": batch,
        "gradient_accumulation_steps": steps,
        "dropout": dropout,
        "compile": compiled,
    }
    return Job({**model, "n_layer": layers, "activation_function": "gelu"}, training | more)


def planned(*job, card="h100-sxm-80gb", **more):
    catalog = Catalog(data_directory())
    model, setup = resolved(keys(*job, **more), catalog)
    gpu = replace(catalog.gpus[card], compute_capability=job[-1])
    return CompiledPlan(model, setup).evaluate(Device(gpu, card))


@pytest.mark.parametrize("job", PEAKS)
def test_peaks_are_those_of_the_compilers_own_programs(job):
    assert planned(*job).requested_bytes == pytest.approx(PEAKS[job], rel=0.01)


def test_a_compiler_saves_memory_and_adds_up_gradients_late():
    job = next(iter(PEAKS))
    compiled, eager = planned(*job), planned(*job, compiled="none")
    assert compiled.requested_bytes < 0.9 * eager.requested_bytes
    small = (512, 64, 4, 512, 8, 1, 2, *job[7:])
    plan = planned(*small)
    assert plan.peak.name == "second backward"
    table = 4 * 512 * 512
    assert plan.requested_bytes > plan.persistent_bytes + plan.states.gradient_bytes - table


def test_the_upper_end_has_a_copy_where_the_compiler_may_pad():
    plain, odd = planned(*next(iter(PEAKS))), planned(50257, *next(iter(PEAKS))[1:])
    assert odd.requested_bytes < plain.requested_bytes
    assert odd.upper_bytes - odd.device_bytes > plain.upper_bytes - plain.device_bytes + 2 * 4096 * 50257


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"compiled": "layers"}, "compile: layers is not modelled for gpt2 under stack nanogpt"),
        ({"stack": "transformers"}, "compile: model is not modelled for gpt2 under stack transformers"),
        ({"weights": {"default": "bf16"}}, "fp32 weights and gradients under autocast"),
        ({"weights": {"default": "fp32", "norm": "bf16"}}, "fp32 weights and gradients under autocast"),
        ({"kernels": {"loss": "fused-head"}}, "kernels.loss: fused-head is not modelled for nanogpt"),
        ({"kernels": {"attention": "math"}}, "kernels.attention: math is not modelled with compile: model"),
    ],
)
def test_what_was_not_read_is_refused(more, said):
    with pytest.raises(CannotAnswerError, match=said):
        planned(*next(iter(PEAKS)), **more)


@pytest.mark.slow
@pytest.mark.parametrize("job", PEAKS)
def test_the_compilers_own_programs_run_without_a_gpu(job):
    pytest.importorskip("torch")
    from tests.survey.stacks.drawn_stack_jobs import StackJob
    from tests.survey.stacks.judged_stack_jobs import traced

    trace = traced(StackJob(keys(*job, kernels={"optimizer": "fused"}), job[-1], False), Catalog(data_directory()))
    assert trace.peak.bytes == PEAKS[job]
