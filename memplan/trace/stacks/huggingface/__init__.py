"""Programs of transformers, PEFT, bitsandbytes and TRL."""
