"""What frozen models beside the one that is trained have alive."""
