"""Libraries over transformers with trainers of their own, whose code is traced: LLaMA-Factory's v1 engine and ms-swift."""
