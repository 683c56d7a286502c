"""The formula beside what the libraries' own code did: stack records, replayed without the libraries."""

import json
from functools import cache
from pathlib import Path

import pytest

from tests.golden.test_recorded_jobs import hold
from tests.jobs import yaml_data
from tests.survey.stacks.drawn_stack_jobs import StackJob
from tests.survey.stacks.judged_stack_jobs import planned, stack_setup
from tests.survey.stacks.stack_records import catalog_at, read_records

pytestmark = pytest.mark.thorough

FOLDER = Path(__file__).parent
FILES = sorted((FOLDER / "records").glob("*.json"))
PEAK_SHARE, WORST_SHARE, INSTANT_SHARE = 0.001, 0.01, 0.02
UNCOUNTED_BYTES = 600
"""Rotary frequencies and a loop's scalars, which no plan counts: all that the update of states in host memory has on a device."""

KNOWN_GAPS: dict[str, set[int]] = {
    "axolotl.shards": {3},
    "axolotl.staged.shards": {30},
    "axolotl.kto-reward": {6},
    "llama-factory.frozen": {46},
    "llama-factory-v1": {25},
    "llama-factory-v1.shards": {12, 19},
    "llama-factory.kto": {5},
    "llama-factory.ends": {13, 20},
    "llama-factory.reference": {21, 40},
    "ms-swift": {7},
    "plain-loop.latent": {23},
    "transformers.4-51": {53},
    "transformers.4-57": {4},
    "transformers.ends": {20},
    "trl.shards": {14},
    "trl.evaluated.shards": {4},
    "trl.preferences-zero-3.shards": {8},
    "transformers.fsdp1.shards": {25, 28, 29, 34},
    "transformers.fsdp1-adapters.shards": {19},
    "axolotl.fsdp1-adapters.shards": {11},
    "transformers.fsdp1-as-stored.shards": {19, 27, 28, 31},
    "transformers.vision-deepspeed.shards": {6, 23, 24, 28},
    "transformers.no-reshard.shards": {12},
    "transformers.offload.shards": {3},
    "transformers.fsdp1-offload.shards": {4, 25, 31},
    "trl.0-28": {8, 23},
    "trl.grpo": {17, 23, 33},
    "llama-factory.hosted": {0, 23},
    "trl.grpo-0-29": {8},
    "trl.pairs": {47},
    "trl.pairs-0-29": {11},
    "transformers.newer": {17},
    "transformers.5-24": {53, 67, 100, 103},
}
"""Records that the formula does not follow yet; one that it follows must leave the list. All are drawn at random, and none was left out
for how it agrees, but for some quantised mixtures and GPT-NeoX in `trl.pairs`, `trl.pairs-0-29` and `plain-loop.4-48`, which did not and are refused since.

Known causes: with `llama-factory-v1` 25 it is 60 kB after backward of a tiny Phi with adapters; with `llama-factory-v1.shards` 12 GPT-NeoX with a tied head, below the peak;
with `llama-factory.ends` it is what lasts of towers beside adapters on fp32 weights, which LLaMA-Factory never loads so, and with
`llama-factory.reference` the forward of two models whose weights outweigh their rows, 4 and 7 % high below the peak;
with `trl.evaluated.shards` 4 the optimizer's step of a StableLM with adapters that has 20 kB there, 3.7 kB low;
with `trl.preferences-zero-3.shards` 8 the padding of what a reference model's engine gathers alone and keeps, 512 bytes;
with `llama-factory.kto` 5 Granite's scaled logits under fp16;
with `transformers.vision-deepspeed.shards` 28 what the rank that was traced keeps, 41 kB more than the fullest of the formula;
with `transformers.ends` 1 a mixture whose layers have experts by turns, and with 20 LLM.int8 of a model with three features within,
both without trained ends too;
with `plain-loop.4-51`, `transformers.4-51`, `transformers.4-57` and `trl.0-28` instants below the peak, whose causes were not followed;
with `plain-loop.4-51.experts` it is the mask of eager attention, which reentrant checkpointing up to 4.51 is given by itself, saves, and lets go
of in backward: the plan has it until the graph goes (`called_again`), and so have other records of that time, below the limit;
with `plain-loop.latent` 23 the last norm of a model of 97 words, beside which it still has a name for its embeddings;
with `transformers.4-44` it is the end of backward, 5 and 3 % high below the peak, and with `trl.0-19` BLOOM's probabilities, which it returned to none up to 4.57;
with `llama-factory.hosted` 0 and 23 Llama 4's first layer and EXAONE 4 below the peak, as off where nothing is offloaded;
with `transformers.5-24` instants below the peak of small Gemma 4 models, and forward of two GPT-J of less than 6 MB, 6 and 72 kB low;
with `transformers.newer` 17 it is an instant below the peak of Ministral 3 with attention step by step, which was not followed;
in `axolotl.kto-reward` 6 a reward model of 20 features, 10 kB low; in `axolotl.staged.shards` 30 it is Gemma 3's layer, 2 % low below it. Of the others the
instants, and with `trl.grpo` 23 the peak, were not followed further.
"""

NEAR = {
    "litgpt.0-4": 0.95,
    "transformers.deepspeed": 1.0,
    "transformers.earlier": 0.98,
    "transformers.newer": 1.0,
    "transformers.latest": 1.0,
    "transformers.5-24": 0.97,
    "transformers.optimizers": 0.97,
    "transformers.hsdp.shards": 1.0,
    "transformers.evaluated.shards": 1.0,
    "trl.evaluated.shards": 0.95,
    "transformers.fsdp1.shards": 1.0,
    "transformers.offload.shards": 1.0,
    "transformers.no-reshard.shards": 1.0,
    "torchtitan.no-reshard.shards": 1.0,
    "transformers.fsdp1-offload.shards": 1.0,
    "transformers.fsdp1-adapters.shards": 0.95,
    "transformers.as-stored.shards": 1.0,
    "transformers.fsdp1-as-stored.shards": 1.0,
    "transformers.towers.shards": 1.0,
    "transformers.vision.shards": 1.0,
    "transformers.vision-zero-3.shards": 1.0,
    "transformers.vision-deepspeed.shards": 1.0,
    "axolotl.vision.shards": 1.0,
    "torchtitan.hsdp.tensor.shards": 1.0,
    "torchtitan.tensor.muon.shards": 1.0,
    "transformers.zero-3.shards": 1.0,
    "transformers.deepspeed-offload.shards": 1.0,
    "transformers.fsdp1-no-reshard.shards": 0.96,
    "axolotl": 0.98,
    "axolotl.cut": 1.0,
    "axolotl.shards": 1.0,
    "axolotl.adapters.shards": 1.0,
    "axolotl.fsdp1-adapters.shards": 0.96,
    "axolotl.staged.shards": 0.97,
    "axolotl.pairs": 1.0,
    "axolotl.kto-reward": 0.97,
    "axolotl.preferences": 1.0,
    "torchtitan": 0.95,
    "torchtitan.0-2-2": 1.0,
    "torchtitan.experts": 1.0,
    "torchtitan.0-2-2.shards": 1.0,
    "torchtitan.0-1-0.shards": 1.0,
    "torchtitan.qwen3": 1.0,
    "torchtitan.qwen3.shards": 1.0,
    "torchtitan.some-layers.shards": 1.0,
    "torchtitan.graphs": 1.0,
    "torchtitan.graphs.shards": 1.0,
    "torchtune": 1.0,
    "torchtune.adapters": 1.0,
    "torchtune.shards": 1.0,
    "torchtune.hosted": 0.97,
    "trl.hosted": 0.97,
    "llama-factory.hosted": 0.97,
    "litgpt": 1.0,
    "litgpt.adapters": 0.96,
    "litgpt.shards": 1.0,
    "llama-factory": 1.0,
    "llama-factory.frozen": 1.0,
    "llama-factory-v1": 1.0,
    "llama-factory-v1.shards": 1.0,
    "llama-factory.kto": 0.95,
    "llama-factory.pairs": 0.97,
    "llama-factory.reference": 1.0,
    "llama-factory.reward": 0.96,
    "llama-factory.ends": 1.0,
    "ms-swift": 1.0,
    "ms-swift.preferences": 1.0,
    "plain-loop": 0.98,
    "plain-loop.latent": 0.97,
    "plain-loop.4-51": 1.0,
    "plain-loop.4-51.experts": 0.97,
    "plain-loop.4-44": 1.0,
    "transformers.4-44": 1.0,
    "trl.0-19": 1.0,
    "plain-loop.4-48": 0.97,
    "plain-loop.4-55": 1.0,
    "plain-loop.4-57": 1.0,
    "transformers": 1.0,
    "transformers.4-51": 0.98,
    "transformers.4-55": 0.97,
    "transformers.4-57": 1.0,
    "transformers.4-57.experts": 1.0,
    "transformers.classification": 1.0,
    "axolotl.images": 1.0,
    "llama-factory.images": 1.0,
    "llama-factory.qwen3-images": 1.0,
    "ms-swift.images": 1.0,
    "ms-swift.qwen3-images": 1.0,
    "transformers.gemma3-images": 1.0,
    "transformers.images": 1.0,
    "transformers.qwen3-images": 1.0,
    "transformers.no-autocast": 1.0,
    "transformers.ends": 0.95,
    "torchtitan.shards": 1.0,
    "torchtitan.compiled.shards": 1.0,
    "torchtitan.0-2-2.compiled.shards": 1.0,
    "torchtitan.qwen3.compiled.shards": 1.0,
    "torchtitan.tensor.shards": 1.0,
    "torchtitan.expert-parallel.shards": 1.0,
    "torchtitan.context-parallel.shards": 0.97,
    "torchtitan.pipeline.shards": 1.0,
    "trl.shards": 1.0,
    "transformers.shards": 1.0,
    "trl": 1.0,
    "trl.0-28": 1.0,
    "trl.0-29": 0.98,
    "trl.frozen": 0.98,
    "trl.grpo": 0.95,
    "trl.grpo-0-29": 1.0,
    "trl.pairs": 1.0,
    "trl.pairs-0-29": 1.0,
    "trl.padded": 1.0,
    "trl.preferences": 0.98,
    "trl.preferences.shards": 0.95,
    "trl.preferences-zero-3.shards": 0.96,
    "trl.reward": 0.97,
    "trl.reward-0-29": 0.97,
    "trl.vision": 1.0,
    "unsloth": 1.0,
    "trl.flash-attn": 1.0,
}
"""Share of a stack's records whose peak the formula has within 0.1 %, which may grow and not shrink."""

ROWS = {
    "torchtitan": "torchtitan 0.3.0, Llama 3",
    "torchtitan.qwen3": "torchtitan 0.3.0, Qwen3",
    "torchtitan.0-2-2": "torchtitan 0.2.2, Llama 3",
    "torchtitan.experts": "torchtitan 0.3.0, Qwen3-MoE, two of three over FSDP2",
    "torchtune": "torchtune 0.6.1, full fine-tuning of Llama",
    "torchtune.adapters": "torchtune 0.6.1, full and adapters, six families",
    "torchtune.hosted": "torchtune 0.6.1, activations in host memory",
    "trl.hosted": "TRL's SFTTrainer 1.16, activations in host memory",
    "llama-factory.hosted": "LLaMA-Factory 0.9.5, activations in host memory",
    "transformers.newer": "Trainer, Gemma 4, Mistral Small 4, LLaVA and others",
    "transformers.latest": "Trainer, Llama 4, LFM2 and Gemma 4 12B",
    "transformers.5-24": "Trainer on transformers 5.24, Gemma 4 and GPT-J",
    "transformers.optimizers": "Trainer 5.24, other optimizers",
    "transformers.earlier": "Trainer, OPT, GPT-Neo and J, BLOOM, StarCoder, OLMoE",
    "plain-loop": "a plain loop on transformers 5.23 and peft 0.21",
    "plain-loop.latent": "the same, DeepSeek V2, V3 and GLM-4.7 Flash",
    "plain-loop.4-57": "a plain loop on transformers 4.57",
    "plain-loop.4-55": "a plain loop on transformers 4.55",
    "plain-loop.4-51": "a plain loop on transformers 4.51",
    "plain-loop.4-51.experts": "the same, experts that are modules, four families",
    "plain-loop.4-48": "a plain loop on transformers 4.48",
    "plain-loop.4-44": "a plain loop on transformers 4.44",
    "transformers": "transformers' Trainer",
    "transformers.4-57": "transformers' Trainer 4.57",
    "transformers.4-57.experts": "the same, experts that are modules, four families",
    "transformers.4-55": "transformers' Trainer 4.55",
    "transformers.4-51": "transformers' Trainer 4.51",
    "transformers.4-44": "transformers' Trainer 4.44",
    "transformers.classification": "transformers' Trainer, heads of 1 to 1,000 classes",
    "transformers.images": "transformers' Trainer, rows with images, Qwen2.5-VL",
    "transformers.qwen3-images": "Trainer, rows with images, Qwen3-VL",
    "transformers.gemma3-images": "Trainer, rows with images, Gemma 3",
    "axolotl.images": "axolotl 0.21, rows with images, both families",
    "llama-factory.images": "LLaMA-Factory 0.9.5, rows with images, both",
    "ms-swift.images": "ms-swift 4.6, rows with images, both",
    "llama-factory.qwen3-images": "LLaMA-Factory 0.9.5, rows with images, Qwen3-VL",
    "ms-swift.qwen3-images": "ms-swift 4.6, rows with images, Qwen3-VL",
    "transformers.no-autocast": "Trainer, 16-bit weights without autocast",
    "transformers.ends": "transformers' Trainer, ends and norms beside adapters",
    "trl": "TRL's SFTTrainer 1.16",
    "trl.0-19": "TRL's SFTTrainer 0.19 on transformers 4.53",
    "trl.0-28": "TRL's SFTTrainer 0.28 on transformers 4.57",
    "trl.padded": "TRL's SFTTrainer 1.16, rows with padding",
    "trl.0-29": "TRL's SFTTrainer and DPOTrainer 0.29",
    "trl.preferences": "TRL's DPOTrainer and KTOTrainer 1.16",
    "trl.pairs": "TRL's ORPO, CPO and SimPO 1.16",
    "trl.pairs-0-29": "TRL's ORPO, CPO and SimPO 0.29",
    "trl.reward": "TRL's RewardTrainer 1.16",
    "trl.reward-0-29": "TRL's RewardTrainer 0.29",
    "axolotl.pairs": "axolotl 0.21, ORPO and SimPO",
    "axolotl.kto-reward": "axolotl 0.21, KTO and reward models",
    "llama-factory.pairs": "LLaMA-Factory 0.9.5, DPO, ORPO and SimPO",
    "llama-factory.kto": "LLaMA-Factory 0.9.5, KTO",
    "llama-factory.reference": "LLaMA-Factory 0.9.5, DPO and KTO, full",
    "llama-factory.reward": "LLaMA-Factory 0.9.5, reward models",
    "llama-factory.ends": "LLaMA-Factory 0.9.5, ends that train",
    "ms-swift": "ms-swift 4.6, SFT and classification",
    "ms-swift.preferences": "ms-swift 4.6, DPO, KTO, ORPO, CPO, SimPO, reward",
    "trl.grpo": "TRL's GRPOTrainer 1.16",
    "trl.grpo-0-29": "TRL's GRPOTrainer 0.29",
    "trl.vision": "TRL's SFTTrainer, vision-language models, text",
    "trl.frozen": "TRL's SFTTrainer 1.16, parts of the model frozen",
    "trl.flash-attn": "TRL's SFTTrainer 1.16, attention by flash-attn 2",
    "axolotl": "axolotl 0.21, with Liger's kernels and LLM.int8",
    "axolotl.cut": "axolotl 0.21 with cut cross-entropy 25.1.1",
    "axolotl.preferences": "axolotl 0.21's DPO, its model in TRL 1.14.1",
    "llama-factory": "LLaMA-Factory 0.9.5 on transformers 5.23",
    "llama-factory.frozen": "LLaMA-Factory 0.9.5, `finetuning_type: freeze`",
    "llama-factory-v1": "LLaMA-Factory 0.9.5's v1 engine, full and adapters",
    "unsloth": "unsloth 2026.10.9, LoRA and QLoRA, four families",
    "litgpt": "LitGPT 0.5.13, full fine-tuning",
    "litgpt.adapters": "LitGPT 0.5.13, LoRA and 4-bit weights",
    "litgpt.0-4": "LitGPT 0.4.12",
    "transformers.shards": "FSDP2, Trainer by accelerate 1.15",
    "trl.shards": "FSDP2, TRL by accelerate 1.15",
    "axolotl.shards": "FSDP2, axolotl 0.21",
    "axolotl.adapters.shards": "FSDP2, LoRA and QLoRA, axolotl 0.21",
    "axolotl.fsdp1-adapters.shards": "FSDP1, LoRA and QLoRA, evaluated, axolotl",
    "axolotl.staged.shards": "FSDP2, 4-bit weights staged on the CPU, axolotl 0.21",
    "llama-factory-v1.shards": "FSDP2, tied models, LLaMA-Factory 0.9.5's v1 engine",
    "torchtitan.shards": "FSDP2, torchtitan 0.3.0",
    "torchtitan.compiled.shards": "compiled layers, one GPU and FSDP2, torchtitan 0.3.0",
    "torchtitan.qwen3.compiled.shards": "compiled layers, the same, Qwen3, drawn and chosen",
    "torchtitan.0-2-2.compiled.shards": "compiled layers, FSDP2, torchtitan 0.2.2",
    "torchtitan.0-2-2.shards": "FSDP2, torchtitan 0.2.2",
    "torchtitan.0-1-0.shards": "FSDP2, torchtitan 0.1.0, torch's root as up to 2.7",
    "torchtitan.qwen3.shards": "tensor parallelism and FSDP2, torchtitan, Qwen3",
    "torchtitan.some-layers.shards": "checkpointing of some layers, FSDP2 too, torchtitan",
    "torchtitan.graphs": "CUDA graphs, torchtitan 0.3.0's default, or none",
    "torchtitan.graphs.shards": "CUDA graphs or none, FSDP2, torchtitan 0.3.0",
    "transformers.towers.shards": "FSDP2, vision towers, Trainer",
    "transformers.vision.shards": "FSDP2, vision towers, adapters too, Trainer",
    "axolotl.vision.shards": "FSDP2, vision towers, adapters too, axolotl 0.21",
    "transformers.no-reshard.shards": "FSDP2 and HSDP, units not resharded, Trainer",
    "torchtitan.no-reshard.shards": "FSDP2 and HSDP, units not resharded, torchtitan",
    "transformers.evaluated.shards": "FSDP2, evaluated, Trainer by accelerate 1.15",
    "trl.evaluated.shards": "FSDP2, evaluated, TRL by accelerate 1.15",
    "trl.preferences.shards": "FSDP2, DPO and KTO, TRL by accelerate 1.15",
    "trl.preferences-zero-3.shards": "DeepSpeed 0.19.8, ZeRO 3, DPO, TRL",
    "transformers.hsdp.shards": "HSDP, Trainer by accelerate 1.15",
    "torchtitan.hsdp.tensor.shards": "HSDP, alone and with tensor parallelism, torchtitan",
    "transformers.offload.shards": "FSDP2 and HSDP, shards in host memory",
    "transformers.fsdp1-offload.shards": "FSDP1, shards in host memory, adapters too",
    "transformers.fsdp1.shards": "FSDP1, Trainer by accelerate 1.15",
    "litgpt.shards": "FSDP1, full fine-tuning, LitGPT 0.5.13",
    "torchtune.shards": "FSDP2, full and adapters, torchtune 0.6.1",
    "transformers.as-stored.shards": "FSDP2, no mixed precision, adapters too, Trainer",
    "transformers.fsdp1-as-stored.shards": "FSDP1, no mixed precision, Trainer",
    "transformers.fsdp1-no-reshard.shards": "FSDP1, SHARD_GRAD_OP, Trainer by accelerate 1.15",
    "transformers.fsdp1-adapters.shards": "FSDP1, LoRA and QLoRA, Trainer by accelerate 1.15",
    "torchtitan.tensor.shards": "tensor parallelism and FSDP2, torchtitan 0.3.0",
    "torchtitan.tensor.muon.shards": "the same, the bundled Muon beside AdamW",
    "torchtitan.expert-parallel.shards": "expert and tensor parallelism, FSDP2, torchtitan",
    "torchtitan.context-parallel.shards": "context, expert and tensor parallelism, torchtitan",
    "torchtitan.pipeline.shards": "pipelines, FSDP2 and tensor parallelism, torchtitan",
    "transformers.deepspeed": "DeepSpeed 0.19.8, ZeRO 1 and 2, Trainer",
    "transformers.zero-3.shards": "DeepSpeed 0.19.8, ZeRO 3, Trainer",
    "transformers.vision-deepspeed.shards": "DeepSpeed 0.19.8, ZeRO 1, 2, vision towers, Trainer",
    "transformers.vision-zero-3.shards": "DeepSpeed 0.19.8, ZeRO 3, vision towers, Trainer",
    "transformers.deepspeed-offload.shards": "DeepSpeed 0.19.8, ZeRO 1 to 3 offloaded, Trainer",
}
"""Record -> its row in docs/accuracy.md."""
PAGE = Path(__file__).parents[2] / "docs" / "accuracy.md"


@cache
def plan_of(job: str, transformers: str):
    """Return the plan of a job with models of a version of transformers; those of the newest one are mostly the same."""
    stack_job = StackJob.read(job)
    if transformers and stack_setup(stack_job, catalog_at(transformers)) == stack_setup(stack_job, catalog_at("")):
        return plan_of(job, "")
    return planned(stack_job, catalog_at(transformers))


def planned_records(path: Path):
    """Return plans of a file's jobs, with models of the transformers that ran, and the records."""
    versions, records = read_records(path)
    return [(plan_of(record.job, versions.get("transformers", "")), record) for record in records]


def follows(plan, record) -> bool:
    """Whether the formula has a record's peak, what persists and every instant within the limits."""
    instants = dict(plan.instants)
    uncounted = UNCOUNTED_BYTES if plan.host.tensors else 0
    return (
        abs(plan.requested_bytes - record.peak_bytes) <= WORST_SHARE * record.peak_bytes
        and plan.persistent_bytes == record.persistent_bytes
        and all(
            abs(instants.get(name, size) - size) <= max(uncounted, INSTANT_SHARE * size)
            for name, size in record.instants.items()
        )
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_formula_agrees_with_the_librarys_own_code_as_the_page_says_but_for_known_gaps(path, request):
    planned_jobs = planned_records(path)
    assert {StackJob.read(record.job).stack for _, record in planned_jobs} == {path.stem.partition(".")[0]}
    assert {n for n, pair in enumerate(planned_jobs) if not follows(*pair)} == KNOWN_GAPS.get(path.stem, set())
    pairs = [(plan.requested_bytes, record.peak_bytes) for plan, record in planned_jobs]
    assert sum(abs(own - peak) <= PEAK_SHARE * peak for own, peak in pairs) >= NEAR[path.stem] * len(pairs)
    if not request.config.getoption("--update-golden"):
        assert page_parts()[1][list(ROWS).index(path.stem)] == row_of(path)
    jobs = [record.job for _, record in planned_jobs]
    for quarter in range(4):
        hold(path.stem, quarter, jobs, lambda number: plan_of(jobs[number], ""), request)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_records_are_of_the_versions_that_the_environments_install(path):
    versions, records = read_records(path)
    environments = yaml_data(FOLDER / "environments.yaml")
    groups = environments.get(path.stem, environments[path.stem.partition(".")[0]]).values()
    pinned = dict(package.split("==") for group in groups for package in group)
    assert {name: number.split("+")[0] for name, number in versions.items()}.items() <= pinned.items()
    assert len({record.job for record in records}) == len(records) >= (20 if path.stem.endswith(".shards") else 40)
    assert all(len(record.events) == 64 for record in records)


def test_a_record_of_other_bytes_would_be_noticed():
    record = read_records(FILES[0])[1][0]
    data = json.loads(record.job)
    data["training"]["micro_batch_size"] += 1
    assert plan_of(json.dumps(data), "").requested_bytes != record.peak_bytes


def row_of(path: Path) -> str:
    """Return a record's row of the page: jobs, and those whose peak, instants and persistent bytes the formula has."""
    plans = planned_records(path)
    off = [abs(plan.requested_bytes - record.peak_bytes) / record.peak_bytes for plan, record in plans]
    near = [
        all(abs(dict(plan.instants).get(name, size) - size) <= 0.01 * size for name, size in record.instants.items())
        for plan, record in plans
    ]
    equal = [plan.persistent_bytes == record.persistent_bytes for plan, record in plans]
    shares = [f"{sum(part) / len(plans):.1%}" for part in ([one <= PEAK_SHARE for one in off], near, equal)]
    cells = (ROWS[path.stem], str(len(plans)), shares[0], f"{max(off):.2%}", *shares[1:])
    return f"| {' | '.join(cells)} |".replace("%", " %")


def page_parts() -> tuple[list[str], list[str], list[str]]:
    """Return the lines of the page before the rows of the table of records, these, and those behind."""
    lines = PAGE.read_text(encoding="utf-8").split("\n")
    first = next(n for n, line in enumerate(lines) if line.startswith("| stack | jobs | peak in 0.1 % |")) + 2
    end = lines.index("", first)
    return lines[:first], lines[first:end], lines[end:]


def test_the_page_has_a_row_for_every_record(request):
    """What a row says is judged where its jobs are planned."""
    assert {path.stem for path in FILES} == ROWS.keys()
    before, rows, behind = page_parts()
    if request.config.getoption("--update-golden"):
        rows = [row_of(next(path for path in FILES if path.stem == stem)) for stem in ROWS]
        PAGE.write_text("\n".join([*before, *rows, *behind]), encoding="utf-8")
    assert len(rows) == len(ROWS)
