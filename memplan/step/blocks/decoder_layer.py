"""A whole layer on a tape: attention and a feed-forward part, joined as the placement of its norms says."""

from __future__ import annotations

from memplan.model.inventory import norm_names
from memplan.model.spec import LatentAttention, Layer, MixtureOfExperts
from memplan.step.blocks.feed_forward import MixtureOperations
from memplan.step.blocks.latent_attention import LatentOperations
from memplan.step.tapes.tape import Value


class Builder(LatentOperations, MixtureOperations):
    """Writes layers on a tape."""

    def layer(self, x: Value, layer: Layer) -> Value:
        """Return the residual stream after a layer."""
        names, hidden = self.settings.names, self.settings.hidden_size
        norms = norm_names(names, layer)

        def normed(value: Value, index: int) -> Value:
            return self.norm(value, layer.norm, norms[index], hidden)

        if layer.placement == "parallel":
            first = normed(x, 0)
            with self.tape.holding(first):
                second = normed(x, 1) if len(norms) > 1 else first
                with self.tape.holding(second):
                    attended = self.add(x, self.dropped(self.attention_part(first, layer)))
                    with self.tape.holding(attended):
                        return self.add(attended, self.dropped(self.feed_forward(second, layer)))
        if layer.placement == "post":
            x = self.add(x, self.dropped(normed(self.attention_part(x, layer), 0)))
            with self.tape.holding(x):
                return self.add(x, self.dropped(normed(self.feed_forward(x, layer), 1)))
        if layer.placement == "sandwich":
            x = self.add(x, self.dropped(normed(self.attention_part(normed(x, 0), layer), 1)))
            with self.tape.holding(x):
                return self.add(x, self.dropped(normed(self.feed_forward(normed(x, 2), layer), 3)))
        x = self.add(x, self.dropped(self.attention_part(normed(x, 0), layer)))
        with self.tape.holding(x):
            return self.add(x, self.dropped(self.feed_forward(normed(x, 1), layer)))

    def attention_part(self, x: Value, layer: Layer) -> Value:
        """Return a layer's attention."""
        if isinstance(layer.attention, LatentAttention):
            return self.latent_attention(x, layer.attention, self.settings.names.attention)
        return self.attention(x, layer.attention, self.settings.names.attention)

    def feed_forward(self, x: Value, layer: Layer) -> Value:
        """Return a layer's feed-forward part."""
        if isinstance(layer.feed_forward, MixtureOfExperts):
            return self.mixture(x, layer.feed_forward, self.settings.names.mlp)
        return self.mlp(x, layer.feed_forward, self.settings.names.mlp)
