"""What rows with images pass through before the layers: the blocks of a vision tower, and the projector behind them."""
