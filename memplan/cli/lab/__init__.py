"""The commands of ``memplan lab``."""
