"""One step a call, LoRA on a model in fp16 without autocast: ``checkpointed_step.py FOLDER ROWS TOKENS RANK ATTENTION``."""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

folder, rows, tokens, rank, attention = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
torch_attention = torch.nn.functional.scaled_dot_product_attention


def repeated(query, key, value, *args, **options):
    """Give torch's attention as many keys and values as queries, which its efficient kernel asks for."""
    groups = query.size(-3) // key.size(-3)
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=-3), value.repeat_interleave(groups, dim=-3)
        options.pop("enable_gqa", None)
    return torch_attention(query, key, value, *args, **options)


torch.nn.functional.scaled_dot_product_attention = repeated
model = AutoModelForCausalLM.from_config(
    AutoConfig.from_pretrained(folder), dtype=torch.float16, attn_implementation=attention
).cuda()
model.config.use_cache = False
targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
model = get_peft_model(model, LoraConfig(r=rank, lora_dropout=0.0, task_type="CAUSAL_LM", target_modules=targets))
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
model.enable_input_require_grads()
model.train()
optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-4)
batch = torch.randint(0, 1000, (rows, tokens), device="cuda")


def step():
    optimizer.zero_grad(set_to_none=True)
    out = model(input_ids=batch, labels=batch)
    out.loss.backward()
    optimizer.step()


for _ in range(5):
    step()
