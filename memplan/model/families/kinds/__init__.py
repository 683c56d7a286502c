"""Families by what their layers have in common; each public function reads the configs of the family of its name."""
