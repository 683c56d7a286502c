"""Jobs as LLaMA-Factory's v1 engine can run them: all weights in fp32, or PEFT's adapters on others; clipped, by AdamW."""

from dataclasses import replace

from tests.survey.drawn_jobs import Job
from tests.survey.stacks.drawn_stack_jobs import StackJob

STACK = "llama-factory-v1"


def v1_job(job: StackJob, *, shards: bool) -> StackJob:
    """Return a job with the dtypes that the engine gives models, in which it computes.

    Args:
        shards: Whether several GPUs share it by FSDP2, which gathers all weights in bf16; of a tied model alone.
    """
    training, model = dict(job.job.training), dict(job.job.model)
    if shards:
        training.pop("adapter", None)
        model["tie_word_embeddings"] = True
    dtype = training["weights"]["default"] if "adapter" in training else "fp32"
    dtype = "bf16" if dtype == "fp16" else dtype
    training |= {"weights": {"default": dtype}, "compute_dtype": "bf16" if shards else dtype, "clip_gradients": True}
    training["optimizer"] = {"default": "adamw-fp32"}
    training.pop("loss_scaling", None)
    return replace(job, job=Job(model, training), reentrant=False)
