"""CLIP whose vision part is frozen."""

import torch
from transformers import CLIPConfig, CLIPModel

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
cfg = CLIPConfig(
    text_config={
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 300,
        "max_position_embeddings": 20,
        "eos_token_id": 2,
    },
    vision_config={
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 56,
        "patch_size": 14,
    },
    projection_dim=64,
)
model = CLIPModel(cfg).to(device)
for p in model.vision_model.parameters():
    p.requires_grad = False
opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
for s in range(5):
    ids = torch.randint(3, 300, (20, 17), device=device)
    px = torch.rand(20, 3, 56, 56, device=device)
    out = model(input_ids=ids, pixel_values=px, return_loss=True)
    opt.zero_grad()
    out.loss.backward()
    opt.step()
    with torch.no_grad():
        model.logit_scale.clamp_(0, 4.6052)
    print(s, out.loss.item(), out.logits_per_image.argmax(1).eq(torch.arange(20, device=device)).float().mean().item())
