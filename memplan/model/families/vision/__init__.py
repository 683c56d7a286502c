"""Vision-language models: a vision tower, a projector, and a text model of another family."""
