"""A short convolution between two gates, in the place of attention."""

from memplan.documents.frozen_values import dataclass


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """A causal convolution of each channel, of an input that one part of a projection gates and whose result another gates (LFM2)."""

    kernel_size: int  # Tokens that the convolution looks at, the one at hand included
    prefix: str = "conv"  # What layers call the part
