"""Whisper whose encoder is frozen, with a schedule and clipping by the greatest gradient."""

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration, get_cosine_schedule_with_warmup

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
cfg = WhisperConfig(
    vocab_size=400,
    d_model=96,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=192,
    decoder_ffn_dim=192,
    max_source_positions=100,
    max_target_positions=64,
    num_mel_bins=40,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=3,
)
model = WhisperForConditionalGeneration(cfg).to(device)
model.freeze_encoder() if hasattr(model, "freeze_encoder") else None
opt = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3, foreach=False)
sch = get_cosine_schedule_with_warmup(opt, 1, 10)
for _step in range(5):
    feats = torch.randn(6, 40, 200, device=device)
    labels = torch.randint(4, 400, (6, 33), device=device)
    labels[:, 25:] = -100
    loss = model(input_features=feats, labels=labels).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=float("inf"))
    opt.step()
    sch.step()
    opt.zero_grad()
    print(loss.item(), sch.get_last_lr())
