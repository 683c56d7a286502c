"""Keys without a value on which a trainer ends, and scripts of releases that were not read: each is refused by name."""

import pytest

from memplan.errors import MemplanError
from memplan.library.answers.planned_job import plan_by_share

TRL = "model_name_or_path: Qwen/Qwen3-0.6B\ndataset_name: trl-lib/Capybara\nmax_length: 512\noutput_dir: out\n"
FACTORY = "model_name_or_path: Qwen/Qwen3-0.6B\nstage: sft\nfinetuning_type: lora\ncutoff_len: 512\noutput_dir: out\n"


@pytest.mark.parametrize("text", [TRL, FACTORY])
@pytest.mark.parametrize(
    ("key", "said"), [("per_device_train_batch_size", "as it multiplies it"), ("optim", "no optimizer that")]
)
def test_a_key_without_a_value_is_not_its_default(tmp_path, text, key, said):
    """``None * max(1, n_gpu)`` and ``OptimizerNames(None)`` (transformers/training_args.py, 5.24.0)."""
    path = tmp_path / "job.yaml"
    path.write_text(f"{text}{key}: null\n", encoding="utf-8")
    with pytest.raises(MemplanError, match=said):
        plan_by_share(str(path), gpu="h100")


def test_a_script_of_llama_factorys_first_releases_is_not_taken_for_trls(tmp_path):
    path = tmp_path / "run.sh"
    command = (
        "python src/train_sft.py --do_train --model_name_or_path Qwen/Qwen2-0.5B --finetuning_type lora --output_dir o"
    )
    path.write_text(f"{command}\n", encoding="utf-8")
    with pytest.raises(MemplanError, match="LLaMA-Factory's first releases"):
        plan_by_share(str(path), gpu="h100")
