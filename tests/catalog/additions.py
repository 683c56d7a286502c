"""Entries as a user would add them: each touches one place, the user's own catalog."""

GPU = """\
  name: My Card
  vendor: nvidia
  architecture: custom
  memory_bytes: 25_769_803_776
  memory_kind: stated
  cuda_total_bytes: 25_000_000_000
  cuda_total_kind: stated
  bandwidth_bytes_per_second: 1_000_000_000_000
  dense_flops: {fp32: 50_000_000_000_000, bf16: 100_000_000_000_000}
  interconnect: {kind: pcie-4-x16, bytes_per_second: 32_000_000_000}
  unified_memory: false
  sources: [{url: "https://example.org/card", checked: 2026-01-31}]
"""
FROZEN = """\
  title: Mine, five bits
  block_elements: 32
  block_bytes: 22
  training: frozen
  description: codes of five bits
  sources: [{url: "https://example.org/format", checked: 2026-01-31}]
"""
CODED = """\
  title: Mine, 4 bits
  block_elements: 32
  block_bytes: 18
  training: coded
  codec: q4-0
  codec_scratch: {coding_bytes: 285, blocks_at_once: 32_768, decoding_bytes: 16}
  description: Q4_0 by another name
  sources: [{url: "https://example.org/format", checked: 2026-01-31}]
"""
AMSGRAD = """\
  title: AdamW with AMSGrad
  algorithm: amsgrad
  implementation: torch.optim.AdamW
  options: {amsgrad: true}
  step: torch
  scratch: {form: adamw}
  description: AdamW with the largest second moment so far as a third state
  slots:
    - {name: exp_avg, as_parameter: true}
    - {name: exp_avg_sq, as_parameter: true}
    - {name: max_exp_avg_sq, as_parameter: true}
    - {name: step, layout: scalar, device: device-if-fused}
  sources: [{url: "https://arxiv.org/abs/1904.09237", checked: 2026-01-31}]
"""
RMSPROP = """\
  title: Centred RMSprop with momentum
  algorithm: rmsprop
  implementation: torch.optim.RMSprop
  options: {centered: true, momentum: "0.9"}
  step: torch
  scratch: {form: copies, all_tensors: 1}
  description: A class of torch's that memplan does not know
  slots:
    - {name: square_avg, as_parameter: true}
    - {name: momentum_buffer, as_parameter: true}
    - {name: grad_avg, as_parameter: true}
    - {name: step, layout: scalar, device: host}
  sources: [{url: "https://docs.pytorch.org/docs/stable/generated/torch.optim.RMSprop.html", checked: 2026-01-31}]
"""
NOBODYS = """\
  title: Three slots, and no class
  algorithm: lion
  implementation: untraced
  step: tensor
  scratch: {form: copies, largest_tensor: 3}
  description: Three moments in fp32
  slots:
    - {name: first, block_bytes: 4}
    - {name: second, block_bytes: 4}
    - {name: third, block_bytes: 4}
  sources: [{url: "https://example.org/optimizer", checked: 2026-01-31}]
"""
CONFIG = """\
  description: bf16 weights under an optimizer of mine
  optimizer: {default: mine}
"""


def catalog_text(section: str, body: str, name: str = "mine") -> str:
    """Return a user's catalog with one entry."""
    return f"{section}:\n  {name}:\n" + "".join(f"  {line}\n" for line in body.splitlines())
