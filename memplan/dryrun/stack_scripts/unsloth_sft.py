"""A training script as unsloth's documentation writes one: 4-bit or 16-bit weights, adapters, TRL's SFTTrainer.

It is run, never imported: what it trains is told as JSON (memplan.dryrun.stack_trace).
"""

import json
import os
import sys
from importlib import import_module
from typing import Any


def main() -> None:
    """Train the job that is told."""
    job = json.loads(sys.argv[1])
    os.environ.setdefault("UNSLOTH_SKIP_TORCHVISION_CHECK", "1")  # no text model needs it
    if not job["flash_attn"]:
        sys.modules["flash_attn"] = None  # type: ignore[assignment]  # as where it is not installed
    loader: Any = import_module("unsloth").FastLanguageModel  # before all that it patches
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model, tokenizer = loader.from_pretrained(local_files_only=True, **job["from_pretrained"])
    model = loader.get_peft_model(model, **job["get_peft_model"])
    length = job["arguments"]["max_length"]
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"text": ["a " * length] * job["rows"]}),
        args=SFTConfig(output_dir="out", report_to=[], **job["arguments"]),
    )
    trainer.train()


if __name__ == "__main__":
    main()
